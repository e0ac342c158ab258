"""Flags that cannot be used, in this process; tests/system/test_commands.py runs the commands."""

import argparse
import io
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cachestore import settings
from engine import chat, cli, kvflags, serve
from engine.config import EngineConfig, parse_listen

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


@pytest.mark.parametrize(
    "command", [("serve",), ("quality",), ASK[:2], ("chat",), ("demo",), ("warm", __file__)]
)
@pytest.mark.parametrize(("name", "why"), [("", "empty; give a folder"), ("\udcff", "not UTF-8")])
def test_a_model_without_a_name_is_refused(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], name: str, why: str
) -> None:
    code, said = run(capsys, *command, "--model", name)
    assert code == 2
    assert said.startswith(f"error: --model: {why}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("serve", "--modle", "m"), "--modle: no such flag; did you mean --model?"),
        (("serve", "--model", "m", "--max-bach=8"), "--max-bach: no such flag; did you mean"),
        (("generate", "hello", "--zzz"), "--zzz: no such flag; --help has all"),
        (("--versoin",), "--versoin: no such flag; did you mean --version?"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_misspelt_flag_is_named_whatever_else_is_missing(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    code, said = run(capsys, *words)
    assert code == 2
    assert said.startswith(f"error: {told}")


def test_what_looks_like_a_flag_and_is_a_value_is_one() -> None:
    options = cli.make_parser().parse_args(["generate", "--max 8", "--max-t", "8", "--stop=--zzz"])
    assert (options.prompt, options.max_tokens, options.stop) == ("--max 8", 8, ["--zzz"])
    assert cli.make_parser().parse_args(["generate", "--", "--zzz"]).prompt == "--zzz"


@pytest.mark.parametrize(
    "command",
    [("serve", "--model", "m"), ASK[:2], ("chat",), ("demo",), ("warm", __file__)],
    ids=lambda c: c[0],
)
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--kv-bits", "7"), "--kv-bits 7: no such bits; use 2, 3"),
        (("--kv-bits", "8.5"), "--kv-bits: '8.5' is none of none, N and K,V"),
        (("--kv-bits", "8", "--kv-group-size", "48"), "--kv-group-size 48: no such group"),
        (("--kv-bits", "8", "--cache-codec", "q8"), "--cache-codec would have no effect"),
        (("--kv-bits", "8", "--quantized-kv-start", "9"), "needs --max-batch 1"),
        (("--quantized-kv-start", "9"), "--quantized-kv-start would have no effect"),
        (("--max-kv-size", "4"), "--max-kv-size 4: the first 4 rows"),
        (("--cache-codec", "q9"), "--cache-codec 'q9': no such codec"),
        (("--cache-codec", "none", "--kv-rotate"), "--kv-rotate would have no effect"),
        (("--turbo-keep-first", "4"), "--turbo-keep-first would have no effect"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_whatever_starts_an_engine_knows_how_rows_cannot_be_held(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: tuple[str, ...],
    words: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.setenv("MLX_CACHESTORE_RUNTIME_DIR", str(tmp_path))
    code, said = run(capsys, *command, *words)
    assert code == 2
    assert named in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [ASK, ("chat", *ASK[2:])], ids=["generate", "chat"])
def test_how_rows_are_held_is_not_for_an_engine_that_is_named(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    code, said = run(capsys, *command, "--cache-codec", "q4")
    assert code == 2
    assert said == (
        "error: --cache-codec would have no effect: --engine starts no engine; leave it out"
    )


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--kv-bits", "none", "--cache-codec", "none"),
        *[("--kv-bits", bits, "--kv-group-size", "32", "--kv-rotate") for bits in ("8", "8,4")],
        ("--kv-bits", "4", "--quantized-kv-start", "100", "--max-batch", "1"),
        ("--kv-bits", "4", "--max-kv-size", "128"),
        ("--cache-codec", "q4", "--cache-min-quantize-tokens", "0", "--kv-rotate"),
        ("--cache-codec", "turbo3", "--turbo-keep-first", "0"),
    ],
    ids=" ".join,
)
def test_an_engine_that_is_started_is_told_what_was_said(words: tuple[str, ...]) -> None:
    listen = parse_listen("127.0.0.1:0")
    asking, serving = argparse.ArgumentParser(), settings.Parser(table=serve.TABLE)
    chat.add_flags(asking)
    serve.add_flags(serving)
    passed_on = kvflags.serve_words("m", listen, asking.parse_args(words))
    # What became of flags is said only to whoever has given some.
    assert passed_on[passed_on.index("--log-level") + 1] == ("info" if words else "warning")
    started = serve.settings_of(serving.parse_args([*passed_on, "--listen", str(listen)]))
    # Whoever asks it has the reply before him, and its usage.
    assert not started.log_requests
    started = replace(started, log_requests=True)
    said = serving.parse_args(["--model", "m", "--listen", str(listen), *words])
    assert started == serve.settings_of(said)
    assert bool(words) == (started != EngineConfig("m", listen, config_file=Path(os.devnull)))


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
