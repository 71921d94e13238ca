"""Dashboard and alerts name metrics that the server has, and each alert fires by its fault."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Server
from tests.toolchain.deploy.tools import DEPLOY, run_tool

ALERTS = DEPLOY / "monitoring/alerts.yaml"
RULES = {rule["alert"]: rule for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}
I = 'instance="a",job="asr-server"'  # noqa: E741

# Series of a fault, a minute apart, and the minute in which the alert has to fire.
FAULTS: dict[str, tuple[dict[str, str], int]] = {
    "AsrServerDown": ({f"up{{{I}}}": "1 0x5"}, 3),
    "AsrServerNotReady": ({f"asr_ready{{{I}}}": "1 0x10"}, 8),
    "AsrReplicaRestarts": (
        {
            f'asr_replica_restarts_total{{{I},reason="exited"}}': "0 1 2 2x13",
            f'asr_replica_restarts_total{{{I},reason="failed_start"}}': "0 0 1 2x13",
        },
        5,
    ),
    "AsrReplicaStuck": (
        {
            f'asr_replica_restarts_total{{{I},reason="exited"}}': "0+1x15",
            f'asr_replica_restarts_total{{{I},reason="hung"}}': "0 0 1x13",
        },
        4,
    ),
    "AsrRequestsRejected": ({f"asr_requests_rejected_total{{{I}}}": "0+60x20"}, 15),
    "AsrQueueGrows": ({f"asr_chunks{{{I}}}": "200x20", f'asr_slots{{{I},replica="0"}}': "48x20"}, 12),
    "AsrQueueWait": (
        {
            f'asr_chunk_queue_seconds_bucket{{{I},le="10"}}': "0x30",
            f'asr_chunk_queue_seconds_bucket{{{I},le="60"}}': "0+60x30",
            f'asr_chunk_queue_seconds_bucket{{{I},le="+Inf"}}': "0+60x30",
        },
        20,
    ),
    "AsrSlowerThanSpeech": (
        {
            f'asr_request_rtfx_bucket{{{I},le="0.5"}}': "0+6x30",
            f'asr_request_rtfx_bucket{{{I},le="1"}}': "0+7x30",
            f'asr_request_rtfx_bucket{{{I},le="+Inf"}}': "0+10x30",
        },
        25,
    ),
    "AsrServerErrors": (
        {
            f'asr_requests_total{{{I},route="/v1/audio/transcriptions",status="200"}}': "0+60x20",
            f'asr_requests_total{{{I},route="/v1/audio/transcriptions",status="500"}}': "0+6x20",
        },
        15,
    ),
    "AsrRequestsStalled": ({f"asr_requests_stalled_total{{{I}}}": "0 1x10"}, 3),
    "AsrDecodeProcessDeaths": ({f"asr_decode_process_deaths_total{{{I}}}": "0 1 2 3 4 5x12"}, 7),
}


def served_names(server: Server) -> set[str]:
    """Return the names of series, those too that begin with their first label."""
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {"up"} | {f.name + ending for f in families for ending in endings.get(f.type, ("",))}


def names_of(expression: str) -> set[str]:
    return set(re.findall(r"\b((?:asr|process)_[a-z_]+|up)\b(?=[{\[ )]|$)", expression))


def test_alerts_name_metrics_that_the_server_has(server: Server) -> None:
    for name, rule in RULES.items():
        named = names_of(rule["expr"])
        assert named, name
        assert named <= served_names(server), name
        assert rule["annotations"]["runbook"], name


def test_the_dashboard_names_metrics_that_the_server_has(server: Server) -> None:
    board = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    for expression in expressions:
        assert names_of(expression), expression
        assert names_of(expression) <= served_names(server), expression


def test_promtool_takes_the_rules() -> None:
    run_tool("promtool", "check", "rules", ALERTS)


@pytest.mark.parametrize("name", RULES)
def test_an_alert_fires_by_its_fault_and_not_without(name: str, tmp_path: Path) -> None:
    series, minute = FAULTS[name]
    inputs = [{"series": key, "values": values} for key, values in series.items()]
    check = tmp_path / "check.yaml"
    expression = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
    test = {
        "interval": "1m",
        "input_series": inputs,
        "promql_expr_test": [
            {"expr": expression, "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": 0}]},
            {"expr": expression, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": 1}]},
        ],
    }
    check.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))
    run_tool("promtool", "test", "rules", check)
