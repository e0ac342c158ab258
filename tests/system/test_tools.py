"""`engine bench-kv` and `engine quality` as people type them, in a pipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import save_tiny_model


def run(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [Path(sys.executable).with_name("engine"), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "NO_COLOR": "1", **environment},
    )


def test_bench_kv_in_a_pipe_is_a_whole_plain_table(tmp_path: Path) -> None:
    words = ("--layers", "1", "--heads", "1", "--seq-len", "512", "--codec", "q8", "q4r")
    ran = run("bench-kv", *words, "--json", str(tmp_path / "found.json"))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    assert "…" not in ran.stdout
    for row in json.loads((tmp_path / "found.json").read_text()):
        (line,) = (line for line in ran.stdout.splitlines() if f" {row['codec']} " in line)
        assert f" {row['ratio']:.2f} " in line
        assert f" {row['cosine']:.5f} " in line


def test_quality_in_a_pipe_is_a_plain_table_and_says_nothing_else(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    sizes = ("--prefix", "16", "--scored", "4", "--windows", "1")
    ran = run("quality", "--model", str(model), *sizes, "--codec", "q8")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    assert [line for line in ran.stdout.splitlines() if " q8 " in line]


@pytest.mark.parametrize("command", ["bench-kv", "quality"])
def test_help_says_what_the_columns_mean(command: str) -> None:
    ran = run(command, "--help", COLUMNS="100")
    assert ran.returncode == 0
    assert "--codec CODEC" in ran.stdout
    assert {"bench-kv": "to float32", "quality": "mean KL"}[command] in ran.stdout
