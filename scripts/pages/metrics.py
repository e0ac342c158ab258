"""docs/metrics.md, from the metrics of both daemons."""

from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric

from cachestore.exporter import ProcessMetrics
from cachestore.metrics import StoreMetrics
from engine.metrics import EngineMetrics

TEMPLATE = Path(__file__).with_suffix(".md")
SUFFIXES = {"counter": "_total", "info": "_info"}


def page() -> str:
    return TEMPLATE.read_text(encoding="utf-8").format(
        engine=_table(EngineMetrics().describe()),
        store=_table(StoreMetrics().describe()),
        process=_table(ProcessMetrics().collect()),
    )


def _table(metrics: Iterable[Metric]) -> str:
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        name = metric.name + SUFFIXES.get(metric.type, "")
        # An info is a gauge to Prometheus, always 1.
        kind = "gauge" if metric.type == "info" else metric.type
        cells = (f"`{name}`", kind, _labels(metric), metric.documentation)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _labels(metric: Metric) -> str:
    """With the values that they take, where those are not facts about the process."""
    values: dict[str, list[str]] = {}
    for sample in metric.samples:
        for label, value in sample.labels.items():
            values.setdefault(label, []).append(value)
    values.pop("le", None)
    if metric.type == "info":
        return ", ".join(f"`{label}`" for label in values)
    return "; ".join(f"`{label}`: {', '.join(found)}" for label, found in values.items())
