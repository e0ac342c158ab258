"""`engine chat` as people and scripts run it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.support.daemons import Cachestore, end_store, own_places
from tests.support.engines import chat, start_engine
from tests.support.models import llama_config, save_tiny_model
from tests.support.waiting import until

SUMMARY = re.compile(r"(\d+) prompt tokens, (\d+) cached; first token after \d+ ms")


def start(directory: Path, *flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [Path(sys.executable).with_name("engine"), "chat", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **own_places(directory), "NO_COLOR": "1"},
    )


def say(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def read_some(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.read(1)


def read_line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


@pytest.fixture
def model(directory: Path) -> Path:
    # Room for two long replies, wherever the first one is interrupted.
    return save_tiny_model(directory / "model", llama_config(max_position_embeddings=8192))


def test_lines_are_turns_of_one_conversation(
    directory: Path, cachestore: Cachestore, model: Path
) -> None:
    with start_engine(directory, model, "--cachestore", f"unix:{cachestore.socket}") as engine:
        flags = ("--engine", str(engine.listen), "--system", "Be brief.", "--max-tokens", "9")
        process = start(directory, *flags)
        out, err = process.communicate("Hello there\n\nAnd now?\n", timeout=60)
        assert process.returncode == 0, err
        said = [("system", "Be brief."), ("user", "Hello there")]
        _, first, _ = engine.generate(prompt=chat(*said), max_tokens=9)
        said += [("assistant", first), ("user", "And now?")]
        _, second, done = engine.generate(prompt=chat(*said), max_tokens=9)
        assert out == f"{first}\n{second}\n"
        usages = [tuple(map(int, found)) for found in SUMMARY.findall(err)]
        assert len(usages) == 2
        assert usages[1][0] == done.usage.prompt_tokens
        assert usages[1][1] > 0.5 * usages[0][0]


def test_ctrl_c_stops_a_reply_and_the_conversation_goes_on(directory: Path, model: Path) -> None:
    with start_engine(directory, model, "--cachestore", "off") as engine:
        process = start(directory, "--engine", str(engine.listen), "--max-tokens", "1500")
        say(process, "Hello there")
        read_some(process.stdout)
        engine.process.send_signal(signal.SIGSTOP)  # so that the reply does not end before
        process.send_signal(signal.SIGINT)
        try:
            stopped = read_line(process.stderr)
        finally:
            engine.process.send_signal(signal.SIGCONT)
        _, err = process.communicate("And now?\n", timeout=120)
        said = chat(("user", "Hello there"), ("assistant", ""), ("user", "And now?"))
        with connect(engine.listen) as stub:
            without_reply = stub.Tokenize(pb.TokenizeRequest(prompt=said)).token_ids
    assert process.returncode == 0, err
    assert stopped == "stopped\n"
    (usage,) = SUMMARY.findall(err)
    assert int(usage[0]) > len(without_reply)


def test_an_engine_of_its_own_ends_with_it(directory: Path, model: Path) -> None:
    process = start(directory, "--model", str(model), "--max-tokens", "3")
    out, err = process.communicate("Hello\nAgain\n", timeout=120)
    assert process.returncode == 0, err
    assert len(SUMMARY.findall(err)) == 2
    assert out
    assert not (directory / "engine.sock").exists()
    end_store(directory)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_engine_of_its_own_does_not_outlive_it(
    directory: Path, model: Path, number: signal.Signals
) -> None:
    process = start(directory, "--model", str(model), "--max-tokens", "1500")
    say(process, "Hello")
    read_some(process.stdout)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    until(lambda: not (directory / "engine.sock").exists(), "the engine to end")
    end_store(directory)


def test_without_an_engine_there_is_one_line(directory: Path) -> None:
    process = start(directory, "--engine", "unix:/tmp/nobody-is-here.sock")
    _, err = process.communicate("Hello\n", timeout=60)
    assert process.returncode == 1
    assert len(err.strip().splitlines()) == 1
    assert "engine serve" in err


def test_a_script_is_told_of_a_turn_that_failed(directory: Path, model: Path) -> None:
    with start_engine(directory, model, "--cachestore", "off") as engine:
        process = start(directory, "--engine", str(engine.listen))
        _, err = process.communicate("x" * 10_000 + "\nHello\n", timeout=60)
    assert process.returncode == 1
    assert err.startswith("error: INVALID_ARGUMENT: prompt: ")
    assert not SUMMARY.search(err)
