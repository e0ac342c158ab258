"""What a Prometheus server would see of a daemon."""

import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.waiting import until

_PROMTOOL = shutil.which("promtool", path=str(Path(sys.executable).parent)) or shutil.which(
    "promtool"
)
NO_PROMTOOL = "" if _PROMTOOL else "promtool is not installed (scripts/setup dev, on Debian)"


class Scrape:
    """Samples by name and, where they have any, the values of labels in the order of names."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.labels: dict[str, set[str]] = {}
        self._values: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values = [value for _, value in sorted(sample.labels.items())]
                self._values[sample.name, *values] = sample.value
                for label, value in sample.labels.items():
                    self.labels.setdefault(f"{family.name}.{label}", set()).add(value)

    def __getitem__(self, name: str | tuple[str, ...]) -> float:
        return self._values[(name,) if isinstance(name, str) else name]

    def __contains__(self, name: str) -> bool:
        return (name,) in self._values

    @property
    def series(self) -> set[tuple[str, ...]]:
        return set(self._values)

    def all(self, name: str) -> Mapping[str, float]:
        """Values of a metric with one label, by the label's."""
        return {key[1]: value for key, value in self._values.items() if key[0] == name and key[1:]}


def scrape(url: str, timeout_seconds: float = 10.0) -> Scrape:
    with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
        return Scrape(answer.read().decode())


def url_in(log: Path) -> str:
    """Where the daemon that writes this log serves its metrics."""
    found = until(lambda: re.search(r"metrics at (http://\S+)", log.read_text()), "metrics")
    return found[1]


def complaints(text: str) -> str:
    """What promtool has to say of metrics."""
    return checked("metrics", text=text)


def checked(*what: str, text: str = "") -> str:
    """All that `promtool check` says."""
    assert _PROMTOOL is not None
    done = subprocess.run(
        [_PROMTOOL, "check", *what], input=text, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr
