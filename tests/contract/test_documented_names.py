"""What README and docs say by name or number is so in the code: metrics, errors, defaults, paths, files."""

import re
import tomllib
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from websockets.http11 import MAX_LINE_LENGTH

from asr_server.api.upload import ALL_MEMORY_BYTES, MAX_DELIMITERS
from asr_server.cli import main
from asr_server.config import DEFAULT_MODEL, flag_name
from asr_server.protocols.http import MAX_HEADER_BYTES, MAX_HEADERS, MAX_PIPELINED, MIN_BYTES_PER_S
from asr_server.protocols.websockets import BYTES_PER_FRAME, FRAMES_PER_S
from asr_server.server.settings import FIELDS, ServerSettings, environment_names
from tests.conftest import Server
from tests.contract.test_documentation import PAGES, README, ROOT, blocks_of, unknown_flags
from tools import draw_comparison, make_settings_page

DOCS = ROOT / "docs"
MONITORING, LIMITS, DEPLOY, ERRORS = (
    DOCS / f"{name}.md" for name in ("monitoring", "limits", "deploy", "errors")
)
ARCHITECTURE = ROOT / "asr_server" / "README.md"
CODE = "\n".join(
    path.read_text()
    for folder in ("asr_server", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sh", ".js", ".html")
)


def rows_of(page: Path, first_heading: str) -> list[list[str]]:
    """The cells of the first table whose head begins with this heading."""
    _, _, after = page.read_text().partition(f"\n| {first_heading} ")
    lines = after.split("\n\n")[0].splitlines()[2:]
    assert lines, f"{page.name} has no table that begins with {first_heading!r}"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| "))] for line in lines]


def names_in(text: str, pattern: str) -> set[str]:
    return set(re.findall(rf"`({pattern})", text))


# -- Metrics -------------------------------------------------------------------------------------------------


def served_metrics(server: Server) -> dict[str, set[str]]:
    """Each metric of ours with its labels, as it is named where it is counted."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        found[family.name.removesuffix(ending) + ending] = labels
    return {name: labels for name, labels in found.items() if name.startswith("asr_")}


def documented_metrics(names: set[str]) -> Iterator[tuple[str, set[str]]]:
    """`_busy` behind `asr_preprocess_workers` is `asr_preprocess_workers_busy`, or `asr_preprocess_busy`."""
    for first, *_ in rows_of(MONITORING, "metric"):
        spans = re.findall(r"`([a-z_*]+)?(?:\{([a-z,]+)\})?`", first)
        whole = spans[0][0]
        shared = {name for _, labels in spans if _ == "" for name in labels.split(",")}
        for name, labels in spans:
            if name.startswith("_"):
                parts = whole.split("_")
                name = next(
                    each for n in range(len(parts), 0, -1) if (each := "_".join(parts[:n]) + name) in names
                )
            if name.startswith("asr_"):
                yield name, shared | ({*labels.split(",")} if labels else set())


OF_JOBS = ("asr_jobs", "asr_jobs_queued_audio_seconds", "asr_jobs_oldest_queued_seconds")


def test_every_metric_is_in_the_table_with_its_labels_and_nothing_else_is(server: Server) -> None:
    served = served_metrics(server)
    told = dict(documented_metrics(set(served)))
    assert set(told) == set(served)
    assert {name: labels for name, labels in told.items() if served[name] and labels != served[name]} == {}
    for page in PAGES:
        named = names_in(page.read_text(), r"asr_[a-z_]+[a-z](?=[`{])") - {"asr_server", *OF_JOBS}
        assert named <= {*served, "asr_preprocess_workers"}, page.name


# -- Errors, paths and headers of HTTP -----------------------------------------------------------------------


def test_every_path_of_http_that_is_named_is_answered(server: Server) -> None:
    described = [path.replace("{name}", "NAME") for path in server.get("/openapi.json").json()["paths"]]
    others = {
        *("/asr", "/detect-language", "/inference", "/docs", "/openapi.json", "/static-offline-docs"),
        *("/v1", "/v1/activity", "/v1/batches", "/v1/files", "/v1/listen"),
        *("/v1/realtime", "/v1/realtime/client_secrets"),
    }
    for page in PAGES:
        paths = re.findall(r"`(?:GET |POST |WS )?(/(?:v1/[a-zA-Z_/]+|[a-z]+))(?=[`?])", page.read_text())
        assert {*paths} <= {*described, *others, "/", "/models", "/tmp", "/model"}, page.name
    assert server.get("/docs").status_code == 200


def test_headers_and_variables_that_are_named_are_known_to_the_code() -> None:
    code = CODE.lower()
    for page in PAGES:
        text = page.read_text()
        headers = {name.lower() for name in re.findall(r"`(x-[a-z-]+|retry-after[a-z-]*)`", text, re.I)}
        assert [name for name in headers if not re.search(rf"\b{name}\b", code)] == [], page.name
        settings = {variable for name in FIELDS for variable in environment_names(name)}
        variables = set(re.findall(r"`((?:ASR|VLLM|HF|ORT|CUDA|RAY)_[A-Z_]+)", text)) - settings
        of_libraries = {"HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "RAY_ADDRESS", "HF_HOME"}
        assert [name for name in variables - of_libraries if name not in CODE] == [], page.name


# -- Settings ------------------------------------------------------------------------------------------------


def number_of(text: str) -> float | None:
    """The number that a table's cell begins with: `64 KiB`, `1 GiB: an hour ...`, `10 s`, `1000`."""
    match = re.match(r"(\d+(?:\.\d+)?)(?: (KiB|MiB|GiB))?", text.replace(",", ""))
    scale = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return float(match[1]) * scale.get(match[2], 1) if match else None


def test_the_bounds_of_clients_have_the_defaults_of_the_settings() -> None:
    for _, setting, default, *_ in rows_of(LIMITS, "bound"):
        if setting != "fixed":
            assert number_of(default) == getattr(ServerSettings(), setting.strip("`")), setting


def test_the_fixed_bounds_of_clients_are_those_of_the_code() -> None:
    bounds = {
        "one header line of a WebSocket's request": MAX_LINE_LENGTH,
        "headers of a request, bytes": MAX_HEADER_BYTES,
        "headers of a request, number": MAX_HEADERS,
        "rate of a body, and of reading a reply": MIN_BYTES_PER_S,
        "what frames the chunks of a body, with trailers": MAX_HEADER_BYTES,
        "bytes of all uploads in memory": ALL_MEMORY_BYTES,
        f"WebSocket frames under {BYTES_PER_FRAME} bytes": FRAMES_PER_S,
        "requests sent ahead of replies": MAX_PIPELINED,
        "boundaries in a multipart body": MAX_DELIMITERS,
    }
    rows = rows_of(LIMITS, "bound")
    assert {what: number_of(default) for what, setting, default, *_ in rows if setting == "fixed"} == bounds


def test_the_settings_page_is_the_one_that_the_code_writes() -> None:
    """`python -m tools.make_settings_page` writes it."""
    assert make_settings_page.PAGE.read_text() == make_settings_page.page()


def test_the_chart_of_the_comparison_has_the_figures_of_the_results() -> None:
    """`python -m tools.draw_comparison` draws it."""
    assert draw_comparison.PICTURE.read_text() == draw_comparison.picture()


def test_defaults_in_prose_are_those_of_the_settings() -> None:
    """`--drain-s` (`ASR_SERVER_DRAIN_S`, 25 seconds); `--wyoming-port` (10300)."""
    found = 0
    for page in PAGES:
        for name, number in re.findall(
            r"`(?:--)?([a-z]+[_-][a-z_-]+)` \((?:`[A-Z_]+`, )?([\d.]+)(?: s(?:econds)?)?\)", page.read_text()
        ):
            found += 1
            assert float(number) == getattr(ServerSettings(), name.replace("-", "_")), f"{page.name}: {name}"
    assert found >= 3


def test_flags_and_variables_that_stand_together_are_of_one_setting() -> None:
    variables = {flag_name(name): environment_names(name) for name in FIELDS}
    for page in PAGES:
        for flag, variable in re.findall(r"`(--[a-z-]+)[^`]*`\s\(`([A-Z_]+)`[,)]", page.read_text()):
            assert variable in variables[flag], page.name


def test_readmes_models_have_the_sizes_and_languages_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = CliRunner().invoke(main, ["models"]).stdout.splitlines()
    listed = {name: line for line in lines for name in line.split("  ")[0].split(", ")}
    for cell, size, languages, *_ in rows_of(README, "model"):
        name = re.findall(r"`(.+?)`", cell)[0]
        assert [size, languages] == re.split(r" {2,}", listed[name])[1:3]
        assert ("the default" in cell) == (name == DEFAULT_MODEL)
    for name, size in re.findall(r"`([\w.-]+)` \(([\d.]+ [MG]B)\)", README.read_text().replace("\n", " ")):
        assert f" {size} " in listed[name]


def test_readme_is_short_without_an_empty_cell() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 100
    under_heads = [line for head, line in pairwise(lines) if head.startswith("| ") and line.startswith("| ")]
    assert [line for line in under_heads if re.search(r"^\|.*\S.*\| +\|", line)] == []


# -- Files, benchmarks and packages --------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_tree_that_are_named_are_there(page: Path) -> None:
    folders = (ROOT, ROOT / "asr_server", ROOT / "tests", page.parent)
    spans = re.findall(r"`([\w./*-]+)`", page.read_text())
    own = {span for span in spans if re.search(r"\.(py|sh|mjs|html|md)$", span)}
    own |= {span for span in spans if span.split("/")[0] in OWN_FOLDERS and "/" in span.strip("/")}
    missing = {span for span in own - NOT_OURS if not any(list(folder.glob(span)) for folder in folders)}
    anywhere = {path.name for folder in ("asr_server", "tests") for path in (ROOT / folder).rglob("*.py")}
    tails = {span for span in missing if list(ROOT.glob(f"asr_server/*/{span}"))}
    assert missing - anywhere - tails == set()


NOT_OURS = {"audio/pcm", "audio/pcmu", "audio/pcma", "timing.py"}
OUTPUT = "dist"  # of `make sbom` and `make site`
OWN_FOLDERS = {path.name for path in [*ROOT.iterdir(), *(ROOT / "asr_server").iterdir()] if path.is_dir()}
OWN_FOLDERS -= {OUTPUT}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_and_tests_that_are_named_take_the_options_shown(page: Path) -> None:
    text = page.read_text().replace("\n", " ")
    for module, options in re.findall(r"python -m benchmarks\.(\w+)([^`]*)`", text):
        path = ROOT / "benchmarks" / module
        files = [*path.glob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
        code = "".join(file.read_text() for file in [*files, *(ROOT / "benchmarks").glob("*.py")])
        for flag in re.findall(r" (--[a-z-]+)", options):
            assert f'"{flag}"' in code, f"{module} {flag}"
    for path_named, chosen in re.findall(
        r"python -m pytest [^`]*?(tests/[\w/]+(?:\.py)?)(?: -k (\w+))?`", text
    ):
        path = ROOT / path_named
        assert path.exists(), path_named
        assert not chosen or chosen in path.read_text(), chosen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_extras_that_are_installed_are_there(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[(\w+)\]'", page.read_text())) <= set(extras)


def test_each_dependency_has_its_reason_in_the_architecture() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    optional = (extras[name] for name in ("jobs", "ray", "traces", "wyoming"))
    needed = chain(project["dependencies"], *optional)
    told = " ".join(package for package, _ in rows_of(ARCHITECTURE, "package"))
    assert {re.split(r"[^\w-]", name)[0] for name in needed} <= set(re.findall(r"[\w-]+", told))
    assert set(re.findall(r"(\w+) \(extra", told)) <= set(extras)


# -- The image and Kubernetes --------------------------------------------------------------------------------


def test_kubernetes_probes_what_there_is_and_waits_for_the_drain(server: Server) -> None:
    (text,) = blocks_of(DEPLOY, "yaml")
    spec = yaml.safe_load(text)["spec"]
    (container,) = spec["containers"]
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= pause_s + ServerSettings().drain_s + 3
    for probe in (container["readinessProbe"], container["livenessProbe"]):
        assert probe["httpGet"]["port"] == ServerSettings().port
        assert server.get(probe["httpGet"]["path"]).status_code == 200


def test_the_image_is_as_it_is_told() -> None:
    image = (ROOT / "Dockerfile").read_text()
    text = DEPLOY.read_text()
    (user,) = re.findall(r"^USER (\d+)", image, re.MULTILINE)
    assert f"user {user}" in text
    assert re.findall(r"^EXPOSE (\d+)", image, re.MULTILINE) == [str(ServerSettings().port)]
    assert set(re.findall(r"-p (\d+):", "".join(page.read_text() for page in PAGES))) == {
        str(ServerSettings().port)
    }
    assert set(re.findall(r"--build-arg (\w+)=", text)) <= set(
        re.findall(r"^ARG (\w+)=", image, re.MULTILINE)
    )
    assert "ARG MODELS=base\n" in image
    assert re.findall(r"HF_HOME=(\S+)", image)[-1] in set(re.findall(r"-v [\w-]+:(/\w+)", text))
    assert 'ENTRYPOINT ["asr-server", "serve"]' in image


def test_what_the_image_is_started_with_are_flags_of_the_server() -> None:
    own = {"--read-only", "--tmpfs", "--cap-drop", "--security-opt", "-v", "-p", "--gpus"}  # docker's
    places = [*(page.read_text() for page in PAGES), (ROOT / "Dockerfile").read_text()]
    started = re.findall(r"docker run ((?:[^`\n\\]|\\\n)*)", "\n".join(places))
    assert len(started) >= 3
    for line in started:
        before, _, after = f"{line} ".replace("\\\n", " ").partition(" asr-server ")
        assert set(re.findall(r"(?:^| )(-[\w-]+)", before)) <= own, line
        assert unknown_flags(["serve", *after.split()]) == set(), line


# -- The way of a request, and the clients that were tried ---------------------------------------------------


def test_clients_were_tried_in_the_versions_that_the_tests_install() -> None:
    packages = ("tests/contract/node/package.json", "tests/contract/clients/vercel/package.json")
    texts = [(ROOT / name).read_text() for name in ("constraints.txt", *packages)]
    texts += [path.read_text() for path in (ROOT / "tests/contract/clients").glob("*.txt")]
    for client, told, *_ in rows_of(DOCS / "clients.md", "client"):
        version = re.findall(r"\d+\.\d+\.\d+", told)
        if version:
            assert re.search(rf"(==|: \"){re.escape(version[0])}\b", "\n".join(texts)), client
