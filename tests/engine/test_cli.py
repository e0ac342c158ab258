"""Flags that cannot be used, in this process; tests/system/test_commands.py runs the commands."""

import io
import sys

import pytest

from engine import cli

ASK = ("generate", "hello", "--engine", "unix:/tmp/nobody-is-here.sock")
SERVE = ("serve", "--model", "no/such/folder")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and the last line said."""
    try:
        code = cli.main([*words])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return code, capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [
        (*ASK, "--seed", str(2**64)),
        (*ASK, "--seed", "-1"),
        (*ASK, "--top-k", str(2**32)),
        (*ASK, "--top-k", "some"),
        (*ASK, "--max-tokens", str(2**32)),
        (*ASK, "--max-tokens", "0"),
        (*ASK, "--temperature", "warm"),
        (*ASK, "--model", "smollm2"),
        (*ASK, "--stop", "\udcff"),
        (*ASK, "--system", "\udcff"),
        (*SERVE, "--max-batch", "0"),
        (*SERVE, "--idle-exit", "soon"),
        (*SERVE, "--prefill-step", "-1"),
        (*SERVE, "--wired-limit", "-1"),
        (*SERVE, "--cachestore", "off", "--cachestore-budget", "1GiB"),
        (*SERVE, "--cachestore", "unix:/tmp/x.sock", "--cachestore-budget", "1GiB"),
    ],
    ids=" ".join,
)
def test_a_value_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, said = run(capsys, *words)
    assert code == 2
    assert words[-2] in said
    assert "invalid _" not in said


@pytest.mark.parametrize("prompt", ["h\udcffi", "-"])
def test_a_prompt_that_is_not_utf_8_is_an_error_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"h\xffi"), encoding="utf-8"))
    code, said = run(capsys, "generate", prompt, *ASK[2:])
    assert code == 2
    assert "UTF-8" in said


def test_the_largest_values_are_fine(capsys: pytest.CaptureFixture[str]) -> None:
    largest = str(2**32 - 1)
    words = ("--seed", str(2**64 - 1), "--top-k", largest, "--max-tokens", largest)
    code, said = run(capsys, *ASK, *words)
    assert code == 1
    assert "engine serve" in said
