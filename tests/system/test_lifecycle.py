"""An engine's way from loading to its exit code, as its clients and its manager see it."""

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.support import stalling
from tests.support.daemons import Cachestore
from tests.support.engines import EngineDaemon, chat, ids, start_engine
from tests.support.manager import Manager
from tests.support.models import save_tiny_model
from tests.support.reflection import services
from tests.support.served import refusal
from tests.support.waiting import until

LONG: dict[str, Any] = {"prompt": ids([1, 2, 3]), "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "model")


# --- a worker that stands still ---------------------------------------------------------------


@dataclass
class Stalled:
    """An engine that stands still while `gate` exists, and a stream that waits for it."""

    engine: EngineDaemon
    gate: Path
    manager: Manager
    stream: Any
    log: Path

    def stall(self) -> None:
        self.gate.touch()
        until(lambda: not self.engine.serving(), "health to notice")


@pytest.fixture
def stalled(directory: Path, model: Path) -> Iterator[Stalled]:
    gate = directory / "gate"
    flags = ("--cachestore", "off", "--stall-seconds", "1", "--drain-seconds", "0")
    with (
        Manager(directory / "manager", watchdog_seconds=0.1) as manager,
        start_engine(
            directory,
            model,
            *flags,
            program=stalling.program(gate),
            environment=manager.environment,
        ) as engine,
        connect(engine.listen) as stub,
    ):
        stream = stub.Generate(pb.GenerateRequest(**LONG))
        next(stream)
        made = Stalled(engine, gate, manager, stream, directory / "engine.log")
        made.stall()
        yield made


def test_health_and_the_watchdog_notice_a_worker_that_stands_still(stalled: Stalled) -> None:
    manager = stalled.manager
    assert manager.heard.count("READY=1") == 1
    fed = manager.heard.count("WATCHDOG=1")
    time.sleep(0.5)  # five times its turn
    assert manager.heard.count("WATCHDOG=1") <= fed + 1
    assert "longer than --stall-seconds" in stalled.log.read_text()

    stalled.gate.unlink()
    until(stalled.engine.serving, "health to notice")
    manager.wait("WATCHDOG=1")
    assert next(stalled.stream).HasField("delta")
    stalled.stream.cancel()
    assert stalled.engine.stop() == 0
    assert manager.heard.count("STOPPING=1") == 1


def test_a_worker_that_stands_still_does_not_keep_the_process(stalled: Stalled) -> None:
    began = time.monotonic()
    stalled.engine.process.terminate()
    error = refusal(lambda: list(stalled.stream))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert error.details() == "the engine is stopping"
    assert stalled.engine.process.wait(20) == 1
    assert time.monotonic() - began < 10
    assert not list(stalled.log.parent.glob("engine.sock*"))


def test_a_step_that_is_only_slow_is_no_failure(directory: Path, model: Path) -> None:
    gate = directory / "gate"
    flags = ("--cachestore", "off", "--drain-seconds", "0")
    with (
        start_engine(directory, model, *flags, program=stalling.program(gate)) as engine,
        connect(engine.listen) as stub,
    ):
        stream = stub.Generate(pb.GenerateRequest(**LONG))
        next(stream)
        gate.touch()
        engine.process.terminate()
        assert refusal(lambda: list(stream)).code() == grpc.StatusCode.UNAVAILABLE
        assert engine.process.wait(20) == 0


# --- the end ----------------------------------------------------------------------------------


def test_streams_end_within_the_time_to_drain_or_with_a_status(
    directory: Path, model: Path, cachestore: Cachestore
) -> None:
    flags = ("--cachestore", f"unix:{cachestore.socket}", "--drain-seconds", "2")
    with start_engine(directory, model, *flags) as engine, connect(engine.listen) as stub:
        until(lambda: stub.GetModel(pb.GetModelRequest()).namespace, "the weights' digest")
        short = stub.Generate(pb.GenerateRequest(**{**LONG, "max_tokens": 40}))
        longs = [stub.Generate(pb.GenerateRequest(**LONG)) for _ in range(12)]
        for stream in (short, *longs):
            next(stream)
        engine.process.terminate()
        until(lambda: not engine.serving(), "health to say so")
        late = refusal(lambda: list(stub.Generate(pb.GenerateRequest(**LONG))))
        assert (late.code(), late.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the engine is stopping",
        )
        began = time.monotonic()
        assert list(short)[-1].HasField("done")
        for stream in longs:
            assert refusal(partial(list, stream)).code() == grpc.StatusCode.UNAVAILABLE
        assert engine.process.wait(20) == 0
        assert time.monotonic() - began < 8
    stats = cachestore.stats()
    assert (stats.sessions, stats.leases, stats.bytes_reserved) == (0, 0, 0)
    assert stats.tokens > 0


def test_what_is_computed_is_stored_before_the_end(
    directory: Path, model: Path, cachestore: Cachestore
) -> None:
    flags = ("--cachestore", f"unix:{cachestore.socket}")
    prompt = [(7 * n) % 256 for n in range(1500)]
    with start_engine(directory, model, *flags) as engine, connect(engine.listen) as stub:
        until(lambda: stub.GetModel(pb.GetModelRequest()).namespace, "the weights' digest")
        streams = [
            stub.Generate(pb.GenerateRequest(prompt=ids([n, *prompt]), max_tokens=1))
            for n in range(4)
        ]
        # A reply's last event comes before its rows are packed.
        next(streams[0])
        engine.process.terminate()
        for stream in streams:
            assert list(stream)[-1].HasField("done")
        assert engine.process.wait(30) == 0
    assert cachestore.stats().tokens == 4 * 1501


def test_a_dead_worker_ends_the_process_after_every_caller_has_a_status(
    directory: Path, model: Path
) -> None:
    gate = directory / "gate"
    with (
        start_engine(
            directory, model, "--cachestore", "off", program=stalling.program(gate, "dies")
        ) as engine,
        connect(engine.listen) as stub,
    ):
        streams = [stub.Generate(pb.GenerateRequest(**LONG)) for _ in range(3)]
        for stream in streams:
            next(stream)
        gate.touch()
        for stream in streams:
            error = refusal(partial(list, stream))
            assert error.code() == grpc.StatusCode.INTERNAL
            assert "the engine's worker died" in str(error.details())
        assert engine.process.wait(20) == 1
    assert "the MLX worker died" in (directory / "engine.log").read_text()
    assert not list(directory.glob("engine.sock*"))


# --- what it says of requests -----------------------------------------------------------------

SECRET = "Xyzzy-plugh"
LATE_SECONDS = 3.0


def requests(engine: EngineDaemon) -> None:
    """One that ends, one that is cancelled, one that is refused, one that fails in its prompt."""
    with connect(engine.listen) as stub:
        prompt = chat(("user", SECRET))
        list(stub.Generate(pb.GenerateRequest(prompt=prompt, max_tokens=3, ignore_eos=True)))
        stub.Warm(pb.WarmRequest(prompt=prompt))
        stream = stub.Generate(pb.GenerateRequest(**{**LONG, "prompt": prompt}))
        next(stream)
        stream.cancel()
        refusal(lambda: list(stub.Generate(pb.GenerateRequest(prompt=prompt, stop=[""]))))
        refusal(lambda: list(stub.Generate(pb.GenerateRequest(prompt=chat((SECRET, SECRET))))))
        stream = stub.Generate(pb.GenerateRequest(**{**LONG, "prompt": prompt}), LATE_SECONDS)
        next(stream)
        over = time.monotonic() + LATE_SECONDS
        # It hears of its client's end when its own clock, which began after that one, is over too.
        engine.process.send_signal(signal.SIGSTOP)
        try:
            refusal(lambda: list(stream))
            until(lambda: time.monotonic() > over, "the deadline to pass by its clock")
        finally:
            engine.process.send_signal(signal.SIGCONT)


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if line["message"] == "request"]


def test_each_request_is_a_line_that_says_what_it_came_to(
    directory: Path, model: Path, cachestore: Cachestore
) -> None:
    path = directory / "lines.log"
    flags = ("--cachestore", f"unix:{cachestore.socket}", "--reflection")
    form = ("--log-file", str(path), "--log-format", "json", "--log-level", "debug")
    with start_engine(directory, model, *flags, *form) as engine:
        assert "engine.v1.Engine" in services(engine.listen.target)
        with connect(engine.listen) as stub:
            until(lambda: stub.GetModel(pb.GetModelRequest()).namespace, "the weights' digest")
        requests(engine)
        until(lambda: len(lines(path)) == 6, "six lines")
        assert engine.stop() == 0
    done, warm, cancelled, refused, odd, late = lines(path)
    prompt_tokens = done["prompt_tokens"]
    assert prompt_tokens > len(SECRET)
    assert done["computed_tokens"] == prompt_tokens - done["cached_tokens"]
    assert (done["method"], done["status"], done["finish"]) == ("Generate", "OK", "length")
    assert (done["generated_tokens"], done["match"]) == (3, "miss")
    assert 0 <= done["queue_seconds"] <= done["first_token_seconds"] <= done["total_seconds"]
    assert (warm["method"], warm["status"], warm["stored_tokens"]) == ("Warm", "OK", prompt_tokens)
    assert warm["cached_tokens"] == prompt_tokens - 1
    assert (cancelled["status"], cancelled["prompt_tokens"]) == ("CANCELLED", prompt_tokens)
    assert cancelled["generated_tokens"] >= 1
    assert (refused["status"], odd["status"]) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
    assert late["status"] == "DEADLINE_EXCEEDED"
    assert len({line["id"] for line in (done, warm, cancelled, refused, odd, late)}) == 6
    # Neither prompts nor replies are in any log, at the most talkative level.
    for log in directory.glob("*.log"):
        assert SECRET not in log.read_text()
    assert (directory / "engine.log").read_text() == ""


def test_prompts_are_logged_for_those_who_ask(directory: Path, model: Path) -> None:
    path = directory / "lines.log"
    form = ("--log-file", str(path), "--log-format", "json", "--log-prompts")
    with start_engine(directory, model, "--cachestore", "off", *form) as engine:
        with pytest.raises(grpc.RpcError, match=r"[Uu]nimplemented|not found"):
            services(engine.listen.target)
        text = engine.generate(prompt=chat(("user", SECRET)), max_tokens=3, ignore_eos=True)[1]
        with connect(engine.listen) as stub:
            bad = pb.GenerateRequest(prompt=pb.Prompt(text=SECRET), stop=[""])
            refusal(lambda: list(stub.Generate(bad)))
        until(lambda: len(lines(path)) == 2, "both lines")
        engine.process.send_signal(signal.SIGINT)
        assert engine.process.wait(20) == 0
    done, refused = lines(path)
    assert done["prompt"] == [{"role": "user", "content": SECRET}]
    assert done["reply"] == text
    assert refused["prompt"] == SECRET
    assert refused["details"].startswith("stop: ")
