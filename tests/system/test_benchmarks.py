"""Each benchmark's small size runs, so that it cannot rot. What it measures is not looked at."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import end_store
from tests.support.engines import start_engine
from tests.support.models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("benchmarks") / "model")


def rows_of(name: str, json_path: Path, *flags: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--json", str(json_path)]
    ran = subprocess.run(
        [*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = json.loads(json_path.read_text())
    assert written["machine"]["mlx"]
    assert f"benchmarks.{name}" in written["command"]
    rows: list[dict[str, Any]] = written["rows"]
    assert rows
    return rows


def test_both_servers_give_as_many_tokens_and_only_ours_hits_after_a_kill(tmp_path: Path) -> None:
    rows = rows_of("server", tmp_path / "found.json")
    replies: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        replies[row["scenario"]][row["server"]] = row["completion_tokens"]
        if row["scenario"] == "1 on a prefix, restarted":
            cached = row["cached_tokens"] / row["prompt_tokens"]
            assert (cached > 0.5) == (row["server"] == "mlx-cachestore"), row
    assert len(replies) == 9
    for scenario, tokens in replies.items():
        assert set(tokens) == {"mlx-lm", "mlx-cachestore"}, scenario
        assert tokens["mlx-lm"] == tokens["mlx-cachestore"] > 0, scenario


def test_a_row_that_joins_gives_the_same_token_in_both_batchers(tmp_path: Path) -> None:
    tokens: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in rows_of("join", tmp_path / "found.json"):
        tokens[row["event"], row["history_tokens"]].add(row["token"])
    assert {event for event, _ in tokens} == {"alone", "join", "leave", "growth"}
    joined = {key: seen for key, seen in tokens.items() if key[0] in ("alone", "join")}
    assert all(len(seen) == 1 for seen in joined.values()), joined


def test_lookups_find_what_was_stored(tmp_path: Path) -> None:
    rows = rows_of("lookup", tmp_path / "found.json")
    spans = {row["case"]: row["spans"] for row in rows}
    assert spans["hit"] > spans["hit, first half"] > spans["miss"] == 0
    assert spans["hit, short"] == 1


def test_a_store_under_load_moves_records(tmp_path: Path) -> None:
    for row in rows_of("fragmentation", tmp_path / "found.json"):
        assert row["load"] <= 0.96
        assert row["evicted_bytes"] > 0
        assert row["moved_bytes"] > 0
        assert row["useful"] > 0


def test_attach_and_store_are_measured_beside_memcpy(tmp_path: Path) -> None:
    rows = rows_of("bandwidth", tmp_path / "found.json")
    assert all(row["memcpy_seconds"] > 0 for row in rows)
    # A hybrid with its checkpoint, beside rows alone.
    copied = {row["layout"] for row in rows if "copy state" in row["phase_seconds"]}
    assert (copied, {row["layout"] for row in rows}) == ({"tiny-hybrid"}, {"tiny", "tiny-hybrid"})


def test_attention_over_packed_rows_is_measured_and_right(tmp_path: Path) -> None:
    rows = rows_of("packed_attention", tmp_path / "found.json")
    strategies = {"full precision", "packed-matmul", "dequantize"}
    assert {row["strategy"] for row in rows} == strategies
    assert {row["layer"]["queries"] for row in rows} == {1, 5}
    assert all(row["error"] < 1e-5 and row["seconds"] > 0 for row in rows)


def test_caches_of_each_precision_decode_and_no_write_copies_them(tmp_path: Path) -> None:
    rows = rows_of("decode", tmp_path / "found.json")
    writes = [row for row in rows if row["contender"].startswith("writes alone")]
    assert [row["note"] for row in writes] == ["in place"] * 4
    measured = [row for row in rows if row not in writes]
    assert {row["weights"] for row in measured} == {"float32", "4bit"}
    assert all(row["tokens_per_second"] > 0 and not row["note"] for row in measured), measured
    held = {row["contender"]: row["kv_bytes"] for row in measured if row["context"] == 300}
    # Of 32 bits: a code, and a 64th part of a scale and a bias in the same dtype.
    for bits in (8, 4):
        ratio = held[f"{bits} bits, packed-matmul"] / held["BatchKVCache, mask"]
        assert ratio == pytest.approx((bits + 1) / 32)


def test_churn_asks_a_running_engine_for_new_and_for_cached_rows(
    model: Path, directory: Path, tmp_path: Path
) -> None:
    budget = ("--cachestore-budget", "16MiB")
    with start_engine(directory, model, *budget) as engine:
        rows = rows_of("churn", tmp_path / "found.json", "--engine", str(engine.listen))
    end_store(directory)
    assert len(rows) == 2
    assert all(row["replies"] > 1 and row["completion_tokens"] > 1 for row in rows)
    assert all(row["cached_tokens"] < row["prompt_tokens"] for row in rows)
    assert any(row["cached_tokens"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["prefill_step", "warm"])
def test_the_benchmark_runs(name: str, model: Path, tmp_path: Path) -> None:
    assert rows_of(name, tmp_path / "found.json", "--model", str(model))


@pytest.mark.parametrize("name", ["windows", "hybrid"])
def test_a_miss_is_measured_of_models_with_checkpoints(name: str, tmp_path: Path) -> None:
    rows = rows_of("warm", tmp_path / "found.json", "--random", name)
    assert {"miss, none", "hit, none", "mlx-lm, kept cache"} <= {row["name"] for row in rows}
