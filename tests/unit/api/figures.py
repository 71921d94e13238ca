"""Reads what `/metrics` tells. The counts are of the process, so that tests look at what changes."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.api.running_app import RunningApp

Figures = dict[str, float]


def figures_of(reply: httpx.Response) -> Figures:
    """By name and labels: `asr_requests_total{route="/health",status="200"}`."""
    assert reply.headers["content-type"].startswith("text/plain")
    figures = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            figures[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return figures


async def read(app: RunningApp) -> Figures:
    return figures_of(await app.client.get("/metrics"))


def growth(before: Figures, after: Figures, name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)
