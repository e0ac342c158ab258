"""What docs/metrics.md tells people to give to Prometheus is something that Prometheus takes."""

import re
from pathlib import Path

import pytest

from tests.support.scrapes import NO_PROMTOOL, checked

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "metrics.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.skipif(bool(NO_PROMTOOL), reason=NO_PROMTOOL)
def test_the_configuration_is_one(tmp_path: Path) -> None:
    (config,) = blocks("yaml")
    file = tmp_path / "prometheus.yml"
    file.write_text(config)
    assert "SUCCESS" in checked("config", str(file))


@pytest.mark.skipif(bool(NO_PROMTOOL), reason=NO_PROMTOOL)
def test_the_queries_are_of_metrics_that_there_are(tmp_path: Path) -> None:
    queries = blocks("promql")
    rules = "".join(
        f"  - {{record: page:{n}, expr: {q.strip()!r}}}\n" for n, q in enumerate(queries)
    )
    file = tmp_path / "rules.yml"
    file.write_text(f"groups:\n- name: page\n  rules:\n{rules}")
    assert f"SUCCESS: {len(queries)} rules found" in checked("rules", str(file))
    told = set(re.findall(r"^\| `(\w+)`", PAGE, flags=re.MULTILINE))
    asked = set(re.findall(r"\bmlx_cachestore_\w+", "".join(queries)))
    assert {name.removesuffix("_bucket") for name in asked} <= told
