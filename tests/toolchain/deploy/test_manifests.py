"""The chart, the plain manifests, compose and the unit: valid, and true of the server that they start."""

import json
import math
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from asr_server import __version__
from asr_server.cli import main
from asr_server.cli.serve import read_models
from asr_server.config import Settings
from tests.contract.test_documentation import unknown_flags
from tests.toolchain.deploy.tools import DEPLOY, ROOT, path_of, run_tool

EVERYTHING = (
    "apiKeySecret=keys,keysFileSecret=named,serviceMonitor.enabled=true,networkPolicy.enabled=true,"
    "models.persistence.enabled=true,metricsPort=9000"
)
# What clusters of others ask of a chart.
SURROUNDINGS: dict[str, Any] = {
    "labels": {"team": "speech"},
    "podLabels": {"mesh": "off"},
    "podAnnotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"},
    "serviceAccount": {"create": True, "annotations": {"iam": "role"}},
    "priorityClassName": "important",
    "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "tmp": {"medium": "Memory", "sizeLimit": "2Gi"},
    "extraVolumes": [{"name": "certificates", "secret": {"secretName": "tls"}}],
    "extraVolumeMounts": [{"name": "certificates", "mountPath": "/tls", "readOnly": True}],
    "models": {"persistence": {"enabled": True, "existingClaim": "shared", "accessMode": "ReadWriteMany"}},
    "replicas": 3,
    "service": {"annotations": {"balancer": "internal"}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "1g"},
        "hosts": ["asr.example.com"],
        "tls": [{"hosts": ["asr.example.com"], "secretName": "tls"}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "annotations": {"owner": "x"}},
}
SEVERAL = [
    {"name": "base", "aliases": ["whisper-1"], "load": "pinned"},
    {"name": "turbo", "load": "lazy", "idle_unload_s": 600},
]
CHARTS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "gpu": ("--values", str(DEPLOY / "chart/values-gpu.yaml")),
    "everything": ("--set", EVERYTHING),
    "several": ("--set-json", f"servedModels={json.dumps(SEVERAL)}"),
    "hpa": ("--set", "autoscaling.enabled=true"),
    "keda": ("--set", "keda.enabled=true"),
    "surroundings": tuple(
        word for name, value in SURROUNDINGS.items() for word in ("--set-json", f"{name}={json.dumps(value)}")
    ),
}
OF_OPERATORS = ("ServiceMonitor", "ScaledObject", "RayCluster")  # their schemas are not Kubernetes' own


def rendered(name: str) -> str:
    return run_tool("helm", "template", "asr", DEPLOY / "chart", "--kube-version", "1.33.0", *CHARTS[name])


def resources(text: str) -> Iterator[dict[str, Any]]:
    return (resource for resource in yaml.safe_load_all(text) if resource)


def check_schemas(text: str) -> None:
    known = [resource for resource in resources(text) if resource["kind"] not in OF_OPERATORS]
    run_tool("kubernetes-validate", "--strict", "-k", "1.33", "-", stdin=yaml.safe_dump_all(known))


def check_server(text: str) -> None:
    (deployment,) = [resource for resource in resources(text) if resource["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    check_pod(pod, pod["containers"][0]["args"])


def check_pod(pod: dict[str, Any], words: list[str]) -> None:
    """Check what a pod says of the server: flags, probes, port, time to drain."""
    (container,) = pod["containers"]
    assert unknown_flags(["serve", *(word.partition("=")[0] for word in words)]) == set()
    drains = [float(word.partition("=")[2]) for word in words if word.startswith("--drain-s=")]
    drain_s = drains[0] if drains else Settings().drain_s
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + 3
    assert container["ports"][0]["containerPort"] == Settings().port
    paths = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    }
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert pod["securityContext"]["runAsUser"] == int(
        re.findall(r"^USER (\d+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[0]
    )


@pytest.mark.parametrize("name", CHARTS)
def test_the_chart_gives_valid_resources(name: str) -> None:
    run_tool("helm", "lint", "--strict", DEPLOY / "chart", *CHARTS[name])
    check_schemas(rendered(name))
    check_server(rendered(name))


def test_the_port_of_metrics_is_asked_by_the_monitor_and_apart_from_the_apis_service() -> None:
    named = {(r["kind"], r["metadata"]["name"]): r for r in resources(rendered("everything"))}
    api, metrics = named["Service", "asr-asr-server"], named["Service", "asr-asr-server-metrics"]
    assert [port["name"] for port in api["spec"]["ports"]] == ["http"]
    assert [port["name"] for port in metrics["spec"]["ports"]] == ["metrics"]
    (endpoint,) = named["ServiceMonitor", "asr-asr-server"]["spec"]["endpoints"]
    assert endpoint["port"] == "metrics"


def test_the_models_of_the_chart_are_those_that_the_server_reads(tmp_path: Path) -> None:
    (config,) = [each for each in resources(rendered("several")) if each["kind"] == "ConfigMap"]
    path = tmp_path / "models.yaml"
    path.write_text(config["data"]["models.yaml"])
    first, second = read_models(str(path))
    assert (first["model"], first["model_alias"], first["load"]) == ("base", "whisper-1", "pinned")
    assert (second["model"], second["load"], second["idle_unload_s"]) == ("turbo", "lazy", 600)


def test_a_value_that_the_chart_does_not_have_is_refused() -> None:
    with pytest.raises(AssertionError, match="replica"):
        run_tool("helm", "template", "asr", DEPLOY / "chart", "--set", "replica=2")


def one_of(text: str, kind: str, name: str = "asr-asr-server") -> dict[str, Any]:
    (found,) = [r for r in resources(text) if (r["kind"], r["metadata"]["name"]) == (kind, name)]
    return found


def test_what_a_cluster_asks_for_is_where_it_belongs() -> None:
    text = rendered("surroundings")
    assert all(resource["metadata"]["labels"]["team"] == "speech" for resource in resources(text))
    deployment, monitor, ingress = (
        one_of(text, kind) for kind in ("Deployment", "ServiceMonitor", "Ingress")
    )
    template = deployment["spec"]["template"]
    assert template["metadata"]["labels"]["mesh"] == "off"
    assert template["metadata"]["annotations"] == SURROUNDINGS["podAnnotations"]
    assert deployment["spec"]["strategy"] == SURROUNDINGS["strategy"]
    pod = template["spec"]
    assert pod["serviceAccountName"] == one_of(text, "ServiceAccount")["metadata"]["name"]
    for name in ("priorityClassName", "topologySpreadConstraints"):
        assert pod[name] == SURROUNDINGS[name]
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes["tmp"] == {"emptyDir": SURROUNDINGS["tmp"]}
    assert volumes["models"] == {"persistentVolumeClaim": {"claimName": "shared"}}
    assert "certificates" in volumes
    assert SURROUNDINGS["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]
    assert not [resource for resource in resources(text) if resource["kind"] == "PersistentVolumeClaim"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "asr.example.com"
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == "asr-asr-server"


def test_uploads_lie_on_a_disk_by_default() -> None:
    pod = one_of(rendered("cpu"), "Deployment")["spec"]["template"]["spec"]
    assert pod["volumes"][0]["emptyDir"]["medium"] == ""


@pytest.mark.parametrize(
    ("pods", "share", "wanted"), [(4, 1.0, 5), (4, 0.8, 4), (4, 0.5, 3)], ids=["full", "at target", "half"]
)
def test_full_pods_are_scaled_up_and_idle_ones_down(pods: int, share: float, wanted: int) -> None:
    """By the rule of Kubernetes' autoscaler: a Value is of all pods together, an AverageValue of each."""
    (trigger,) = one_of(rendered("keda"), "ScaledObject")["spec"]["triggers"]
    ratio = share / float(trigger["metadata"]["threshold"])
    assert math.ceil(pods * ratio if trigger["metricType"] == "Value" else ratio) == wanted


@pytest.mark.parametrize("pods", ["replicas=2", "keda.enabled=true", "autoscaling.enabled=true"])
@pytest.mark.parametrize("claim", ["", "mine"])
def test_several_pods_on_a_volume_of_one_are_refused(pods: str, claim: str) -> None:
    values = f"models.persistence.enabled=true,models.persistence.existingClaim={claim},{pods}"
    with pytest.raises(AssertionError, match=r"several pods cannot share a volume .* ReadWriteMany"):
        run_tool("helm", "template", "asr", DEPLOY / "chart", "--set", values)


def test_a_pod_gives_its_volume_up_before_the_next_begins() -> None:
    assert one_of(rendered("gpu"), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_the_plain_manifests_are_valid(folder: str) -> None:
    text = run_tool("kubectl", "kustomize", DEPLOY / "kustomize" / folder)
    check_schemas(text)
    check_server(text)


# -- KubeRay -------------------------------------------------------------------------------------------------

# The fields of ray.io/v1 that may stand here; all but the pods' templates, which Kubernetes' schemas check.
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def ray_cluster() -> dict[str, Any]:
    text = run_tool("kubectl", "kustomize", DEPLOY / "kuberay")
    check_schemas(text)
    (cluster,) = [resource for resource in resources(text) if resource["kind"] == "RayCluster"]
    return cluster


def test_the_ray_cluster_has_valid_pods_and_fields_of_its_version() -> None:
    cluster = ray_cluster()
    spec = cluster["spec"]
    assert (cluster["apiVersion"], set(spec)) == (
        "ray.io/v1",
        {"rayVersion", "headGroupSpec", "workerGroupSpecs"},
    )
    assert set(spec["headGroupSpec"]) == {"rayStartParams", "template"}
    assert all(set(group) == GROUP_FIELDS for group in spec["workerGroupSpecs"])
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        check_schemas(yaml.safe_dump(pod | {"template": group["template"]}))
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_the_pods_of_the_ray_cluster_start_ray_and_the_server_by_their_own_flags() -> None:
    start = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed").start
    ray_flags = {flag for parameter in start.params for flag in parameter.opts}
    spec = ray_cluster()["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert {f"--{name}" for name in group["rayStartParams"]} <= ray_flags
    server, engines = spec["workerGroupSpecs"]
    pod = server["template"]["spec"]
    joining, serving = pod["containers"][0]["args"][0].split(" && exec asr-server serve ")
    assert {word.partition("=")[0] for word in shlex.split(joining)[2:]} <= ray_flags
    words = shlex.split(serving)
    check_pod(pod, words)
    assert f"--replicas={engines['replicas']}" in words
    assert f"--cpu-threads={engines['rayStartParams']['num-cpus']}" in words


def test_the_service_chooses_the_pod_of_the_server() -> None:
    text = run_tool("kubectl", "kustomize", DEPLOY / "kuberay")
    (service,) = [resource for resource in resources(text) if resource["kind"] == "Service"]
    cluster = ray_cluster()
    groups = [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]]
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    assert service["spec"]["selector"]["ray.io/group"] in groups


def test_the_ray_of_the_image_is_the_one_that_is_tested() -> None:
    dockerfile = (DEPLOY / "kuberay/Dockerfile").read_text()
    (version,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"ray[data]=={version}" in dockerfile
    cluster = yaml.safe_load((DEPLOY / "kuberay/raycluster.yaml").read_text())
    assert cluster["spec"]["rayVersion"] == version


# -- Other ways ----------------------------------------------------------------------------------------------


def test_everything_names_the_version_of_the_server() -> None:
    chart = yaml.safe_load((DEPLOY / "chart/Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    for path in ("kustomize/base/deployment.yaml", "compose/compose.yaml", "compose/compose.cuda.yaml"):
        images = re.findall(r"image: asr-server:(\d+\.\d+\.\d+)", (DEPLOY / path).read_text())
        assert images == [__version__], path
    ray_images = [
        image
        for path in ("kuberay/raycluster.yaml", "kuberay/Dockerfile")
        for image in re.findall(r"(?:image:|FROM) asr-server(?:-ray)?:(\S+)", (DEPLOY / path).read_text())
    ]
    assert set(ray_images) == {__version__}


def test_docker_compose_takes_both_files_together() -> None:
    files = [f"--file={DEPLOY / 'compose' / name}" for name in ("compose.yaml", "compose.cuda.yaml")]
    run_tool("docker-compose", *files, "--profile", "monitoring", "config", "--quiet")


def test_compose_mounts_files_that_are_there_and_waits_for_the_drain() -> None:
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    ]
    assert mounted
    assert all((DEPLOY / "compose" / path).is_file() for path in mounted)
    grace_s = float(compose["services"]["asr-server"]["stop_grace_period"].rstrip("s"))
    assert grace_s >= Settings().drain_s + 3


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "asr-server.service"
    text = (DEPLOY / "systemd/asr-server.service").read_text()
    unit.write_text(text.replace("/opt/asr-server/bin/asr-server", "/bin/true"))
    command = [path_of("systemd-analyze"), "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_yamllint_takes_what_is_plain_yaml() -> None:
    paths = [path for path in DEPLOY.rglob("*.yaml") if path.parent.name != "templates"]
    rules = "{extends: relaxed, rules: {line-length: {max: 130}, comments: disable}}"
    run_tool("yamllint", "--strict", "-d", rules, *paths)


def test_the_unit_calls_the_command_with_its_own_flags_and_settings() -> None:
    unit = (DEPLOY / "systemd/asr-server.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+/asr-server (.*)$", unit, re.MULTILINE)
    name, *words = command.split()
    assert name in main.commands
    assert unknown_flags([name, *words]) == set()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)", unit, re.MULTILINE)
    assert float(stop_s) >= Settings().drain_s + 3
