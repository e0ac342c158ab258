"""Real daemons that are killed: the reply stays right, nothing is left, and the next one hits."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachestore.client import Client
from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc
from tests.support.daemons import Cachestore, end_store, start_cachestore
from tests.support.engines import ids, start_engine
from tests.support.models import save_tiny_model
from tests.support.slabs import held_slabs, slabs_of_all_processes
from tests.support.waiting import until

PROMPT = [(7 * n + n * n) % 256 for n in range(300)]
REPLY_TOKENS = 600


@pytest.fixture
def model(directory: Path) -> Path:
    return save_tiny_model(directory / "model")


@pytest.fixture
def expected(directory: Path, model: Path) -> list[int]:
    """The reply of an engine that has no store."""
    with start_engine(directory, model, "--cachestore", "off", name="cold") as engine:
        tokens, _, done = engine.generate(
            prompt=ids(PROMPT), max_tokens=REPLY_TOKENS, ignore_eos=True
        )
    assert done.usage.cached_tokens == 0
    return tokens


def stream(stub: engine_pb2_grpc.EngineStub, tokens: list[int]) -> Iterator[pb.GenerateResponse]:
    request = pb.GenerateRequest(prompt=ids(tokens), max_tokens=REPLY_TOKENS, ignore_eos=True)
    replies: Iterator[pb.GenerateResponse] = stub.Generate(request, timeout=120)
    return replies


def test_the_cachestore_is_killed_during_a_decode(
    directory: Path, model: Path, expected: list[int]
) -> None:
    codec = ("--cache-codec", "none")
    where = f"unix:{directory / 'cachestore.sock'}"
    with (
        start_cachestore(directory) as first,
        start_engine(directory, model, "--cachestore", where, *codec) as engine,
    ):
        engine.generate(prompt=ids(PROMPT), max_tokens=1)
        until(lambda: first.stats().tokens >= len(PROMPT), "the prompt to be stored")
        with connect(engine.listen) as stub:
            replies = stream(stub, PROMPT)
            tokens = [*next(replies).delta.token_ids]
            first.kill()
            done = None
            for reply in replies:
                tokens += reply.delta.token_ids
                done = reply.done if reply.HasField("done") else done
        assert done is not None
        assert done.usage.cached_tokens == len(PROMPT) - 1
        assert tokens == expected

        # While nobody is there, and once somebody is back.
        again, _, done = engine.generate(
            prompt=ids(PROMPT), max_tokens=REPLY_TOKENS, ignore_eos=True
        )
        assert done.usage.match == pb.CACHE_MATCH_UNAVAILABLE
        assert again == expected
        with start_cachestore(directory) as second:
            until(lambda: second.stats().sessions == 1, "the engine to come back")
            cold = engine.generate(prompt=ids(PROMPT), max_tokens=2)[2]
            assert cold.usage.cached_tokens == 0
            until(lambda: second.stats().tokens >= len(PROMPT), "the prompt to be stored")
            warm, _, done = engine.generate(
                prompt=ids(PROMPT), max_tokens=REPLY_TOKENS, ignore_eos=True
            )
            assert done.usage.cached_tokens == len(PROMPT) - 1
            assert warm == expected


def test_the_engine_is_killed_while_it_holds_a_lease(
    directory: Path, model: Path, cachestore: Cachestore, expected: list[int]
) -> None:
    flags = ("--cachestore", f"unix:{cachestore.socket}", "--cache-codec", "none")
    with start_engine(directory, model, *flags) as engine:
        engine.generate(prompt=ids(PROMPT), max_tokens=1)
        until(lambda: cachestore.stats().tokens >= len(PROMPT), "the prompt to be stored")
        with connect(engine.listen) as stub:
            next(stream(stub, PROMPT))
            assert cachestore.stats().leases == 1
            pid = engine.process.pid
            slabs = held_slabs(pid)
            assert slabs or not Path("/proc").exists()
            engine.kill()
            until(lambda: cachestore.stats().leases == 0, "the lease to end", seconds=1.0)
    stats = cachestore.stats()
    assert (stats.sessions, stats.reservations, stats.bytes_reserved) == (0, 0, 0)
    assert stats.bytes_quarantined == 0
    # Of what the engine had mapped, only the daemon's own slabs are left.
    assert slabs & slabs_of_all_processes() <= held_slabs(cachestore.pid)
    with start_engine(directory, model, *flags, name="second") as engine:
        tokens, _, done = engine.generate(
            prompt=ids(PROMPT), max_tokens=REPLY_TOKENS, ignore_eos=True
        )
        assert done.usage.cached_tokens == len(PROMPT) - 1
        assert tokens == expected


@pytest.mark.parametrize("tokens_before", [0, 1, 40])
def test_an_engine_killed_at_any_moment_leaves_no_claim(
    directory: Path, model: Path, cachestore: Cachestore, tokens_before: int
) -> None:
    flags = ("--cachestore", f"unix:{cachestore.socket}")
    with start_engine(directory, model, *flags) as engine, connect(engine.listen) as stub:
        replies = stream(stub, PROMPT)
        for _ in range(tokens_before):
            next(replies)
        engine.kill()
        until(lambda: cachestore.stats().sessions == 0, "the session to end", seconds=1.0)
    stats = cachestore.stats()
    assert (stats.leases, stats.reservations) == (0, 0)
    assert stats.bytes_slabs == stats.bytes_used + stats.bytes_free


# Longer than an engine takes to start, and short enough to wait for.
AUTO = ("--cachestore-budget", "64MiB", "--idle-exit", "10")


def auto_store(directory: Path) -> Client:
    return Client.connect(directory / "cachestore.sock", role="admin")


def wait_stored(directory: Path) -> None:
    with auto_store(directory) as client:
        until(lambda: client.stats().tokens >= len(PROMPT), "the prompt to be stored")


def test_auto_starts_a_store_that_outlives_the_engine_and_ends_when_idle(
    directory: Path, model: Path
) -> None:
    with start_engine(directory, model, *AUTO) as engine:
        engine.generate(prompt=ids(PROMPT), max_tokens=2)
        wait_stored(directory)
        engine.kill()
    with start_engine(directory, model, *AUTO, name="second") as engine:
        done = engine.generate(prompt=ids(PROMPT), max_tokens=2)[2]
        assert done.usage.cached_tokens == len(PROMPT) - 1
        assert engine.stop() == 0
    socket = directory / "cachestore.sock"
    assert socket.exists()
    lock = directory / "cachestore.sock.lock"
    until(lambda: not lock.exists(), "the idle store to end", seconds=30)
    assert not socket.exists()


def test_auto_starts_the_store_again_after_its_death(directory: Path, model: Path) -> None:
    with start_engine(directory, model, *AUTO) as engine:
        engine.generate(prompt=ids(PROMPT), max_tokens=2)
        with auto_store(directory) as client:
            os.kill(client.stats().pid, signal.SIGKILL)

        def hits() -> bool:
            done = engine.generate(prompt=ids(PROMPT), max_tokens=2)[2]
            return bool(done.usage.cached_tokens)

        until(hits, "a hit in the new store", seconds=30)
        assert engine.stop() == 0
    end_store(directory)


def test_sigterm_ends_the_engine_cleanly_while_it_works(
    directory: Path, model: Path, cachestore: Cachestore
) -> None:
    flags = ("--cachestore", f"unix:{cachestore.socket}")
    with start_engine(directory, model, *flags) as engine, connect(engine.listen) as stub:
        replies = stream(stub, PROMPT)
        next(replies)
        engine.process.terminate()
        # The running stream ends by itself: it needs less than the time to drain.
        assert list(replies)[-1].HasField("done")
        assert engine.process.wait(30) == 0
    assert not (directory / "engine.sock").exists()
    assert not (directory / "engine.sock.lock").exists()
