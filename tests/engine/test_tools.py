"""`engine bench-kv` and `engine quality` in this process: flags, tables, files."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.kv.names import known
from tests.support.models import mamba2_config, save_tiny_model
from tests.support.zoo import ZOO

BENCH = ("bench-kv", "--layers", "1", "--heads", "1", "--seq-len", "20")
PNG = b"\x89PNG"
BENCH_KEYS = {
    *("codec", "dtype", "tokens", "bytes", "ratio", "ratio_float32", "mean_error", "max_error"),
    *("cosine", "encode_ms", "decode_ms"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tools") / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The keeper of the lighthouse wrote down the weather. " * 4)
    return path


def run(*words: object) -> int:
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as exit_:
        return int(exit_.code or 0)


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    return rows


@pytest.mark.parametrize(
    "words",
    [
        ("--layers", "0"),
        ("--heads", "some"),
        ("--head-dim", "-1"),
        ("--seq-len", "0"),
        ("--seq-len",),
        ("--dtype", "int8"),
        ("--codec",),
        ("--codec", "q9"),
        ("--codec", "q8", "noner"),
        ("--codec", "q8", "--head-dim", "80"),
        ("--codec", "q4r", "--head-dim", "352"),
        ("--json", "no/such/folder/found.json"),
        ("--json", "."),
        ("--plot", "no/such/folder/found.png"),
        ("--plot", "found.txt"),
    ],
    ids=" ".join,
)
def test_a_flag_of_bench_kv_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert run(*BENCH, *words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {words[0]}")


@pytest.mark.parametrize(
    "words",
    [
        ("--text", "no/such/text"),
        ("--text", "."),
        ("--text", "{binary}"),
        ("--text", "{short}"),
        ("--codec", "q9"),
        ("--prefix", "0"),
        ("--prefix", "3000"),
        ("--scored", "none"),
        ("--windows", "0"),
        ("--kv-bits", "7"),
        ("--kv-bits", "none"),
        ("--kv-rotate",),
        ("--turbo-keep-first", "4"),
        ("--turbo-keep-first", "0"),
        ("--model", "no/such/model"),
        ("--json", "."),
    ],
    ids=" ".join,
)
def test_a_flag_of_quality_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, words: tuple[str, ...]
) -> None:
    files = {"binary": tmp_path / "binary", "short": tmp_path / "short"}
    files["binary"].write_bytes(b"\xff\xfe")
    files["short"].write_text("Too short.")
    said = [word.format(**files) for word in words]
    assert run("quality", "--model", model, "--codec", "none", *said) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {words[0]}")


def test_an_unknown_codec_is_told_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*BENCH, "--codec", "zip") == 2
    assert capsys.readouterr().err.strip().endswith(f"use one of {', '.join(known())}")


@pytest.mark.parametrize("command", ["bench-kv", "quality"])
def test_a_plot_without_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = {"bench-kv": [], "quality": ["--model", "no/such/model"]}[command]
    assert run(command, *words, "--plot", tmp_path / "found.png") == 2
    assert "pip install 'mlx-cachestore[plot]'" in capsys.readouterr().err


def test_lengths_and_codecs_are_lists_and_may_be_repeated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    lists = ("--seq-len", "40", "600", "--codec", "none", "q8", "--codec", "q4r")
    assert run(*BENCH, *lists, "--outliers", "--json", path) == 0
    rows = rows_of(path)
    asked = [(codec, tokens) for codec in ("none", "q8", "q4r") for tokens in (20, 40, 600)]
    assert [(row["codec"], row["tokens"]) for row in rows] == asked
    assert all(row.keys() >= BENCH_KEYS for row in rows)
    for row in rows:
        assert row["bytes"] * 600 == rows[-1]["bytes"] * row["tokens"] or row["codec"] != "q4r"
    table = capsys.readouterr().out
    assert "bfloat16 cache" in table
    assert "outlier" in table


def test_codecs_that_were_not_asked_for_are_left_out_where_they_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert run(*BENCH, "--head-dim", "80", "--json", path) == 0
    codecs = {row["codec"] for row in rows_of(path)}
    assert "none" in codecs
    assert codecs.isdisjoint({"q8", "q4", "q4r"})


def test_bench_kv_draws_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "found.png"
    assert run(*BENCH, "--plot", path) == 0
    assert path.read_bytes().startswith(PNG)


def test_quality_scores_a_text_of_the_users(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, text: Path
) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    sizes = ("--prefix", "32", "--scored", "8", "--windows", "3")
    outputs = ("--json", found, "--plot", picture)
    words = ("quality", "--model", model, "--text", text, *sizes, *outputs)
    assert run(*words, "--codec", "none", "q8", "q4", "q4r") == 0
    rows = rows_of(found)
    assert [row["policy"] for row in rows] == ["full", "none", "q8", "q4", "q4r"]
    assert {(row["tokens"], row["windows"], row["prefix_tokens"]) for row in rows} == {(24, 3, 32)}
    assert {row["dtype"] for row in rows} == {"float32"}
    assert rows[1]["mean_kl"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["mean_kl"] > rows[2]["mean_kl"] > 0
    assert picture.read_bytes().startswith(PNG)
    assert "top token flips" in capsys.readouterr().out


def test_quality_scores_live_bits_rotations_and_kept_tokens(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "found.json"
    sizes = ("--prefix", "40", "--scored", "8", "--windows", "2")
    stored = ("--codec", "turbo2", "--turbo-keep-first", "10")
    live = ("--kv-bits", "8", "--kv-bits", "4,8", "--kv-rotate")
    assert run("quality", "--model", model, *sizes, *stored, *live, "--json", path) == 0
    rows = {row["policy"]: row for row in rows_of(path)}
    bits = ("kv-bits 8,8", "kv-bits 4,8")
    rotated = tuple(f"{name} rotated" for name in bits)
    assert rows.keys() == {"full", "turbo2", "turbo2, first 10 kept", *bits, *rotated}
    full, turbo, kept = (row["bytes_per_token"] for row in list(rows.values())[:3])
    assert kept == pytest.approx((10 * full + 30 * turbo) / 40)
    for plain, turned in zip(bits, rotated, strict=True):
        assert rows[plain]["bytes_per_token"] == rows[turned]["bytes_per_token"]
        assert rows[plain]["mean_kl"] != rows[turned]["mean_kl"]


def test_quality_has_a_text_of_its_own(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "found.json"
    sizes = ("--prefix", "16", "--scored", "4", "--windows", "2")
    assert run("quality", "--model", model, *sizes, "--json", path) == 0
    rows = rows_of(path)
    assert {row["windows"] for row in rows} == {2}
    assert {"full", "none", "q8", "q4", "q4r"} <= {row["policy"] for row in rows}


def test_quality_of_a_model_without_rows_is_that_of_its_state(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    model = save_tiny_model(tmp_path / "model", mamba2_config())
    sizes = ("--prefix", "40", "--scored", "8", "--windows", "2")
    assert run("quality", "--model", model, *sizes, "--json", path) == 0
    full, none = rows_of(path)
    assert (full["policy"], none["policy"]) == ("full", "none")
    assert none["bytes_per_token"] == full["bytes_per_token"] > 0
    assert none["mean_kl"] == pytest.approx(0, abs=1e-6)


def test_a_model_that_cannot_be_stored_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", ZOO["deepseek_v41"]())
    assert run("quality", "--model", model) == 2
    assert "cannot be measured: kinds of layers that are not cached" in capsys.readouterr().err
