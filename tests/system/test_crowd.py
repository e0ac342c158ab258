"""One prefill for a crowd: requests on one cold prefix wait for whoever computes it first."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from engine.v1 import engine_pb2 as pb
from tests.support.daemons import Cachestore
from tests.support.engines import EngineDaemon, connect, ids, start_engine
from tests.support.models import save_tiny_model
from tests.support.waiting import until

PREFIX = [int(t) for t in np.random.default_rng(1).integers(0, 256, 1000)]
TAIL, CROWD, RECORD = 7, 8, 256
# Slow enough that a crowd arrives while the first one computes.
FLAGS = ("--cache-codec", "none", "--prefill-step", "16")


def tail(number: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(100 + number).integers(0, 256, TAIL)]


@pytest.fixture
def model(directory: Path) -> Path:
    return save_tiny_model(directory / "model")


@pytest.fixture
def expected(directory: Path, model: Path) -> list[list[int]]:
    """Replies of an engine without a store."""
    with start_engine(directory, model, "--cachestore", "off", name="cold") as engine:
        return [reply(engine, number)[0] for number in range(CROWD)]


@pytest.fixture
def engines(
    directory: Path, model: Path, cachestore: Cachestore, expected: list[list[int]]
) -> Iterator[list[EngineDaemon]]:
    flags = ("--cachestore", f"unix:{cachestore.socket}", *FLAGS)
    with (
        start_engine(directory, model, *flags, name="one") as one,
        start_engine(directory, model, *flags, name="two") as two,
    ):
        yield [one, two]


def reply(engine: EngineDaemon, number: int) -> tuple[list[int], pb.Done]:
    tokens, _, done = engine.generate(
        prompt=ids(PREFIX + tail(number)), max_tokens=6, ignore_eos=True
    )
    return tokens, done


def computed(done: list[pb.Done]) -> int:
    return sum(d.usage.prompt_tokens - d.usage.cached_tokens for d in done)


@pytest.mark.parametrize("engine_count", [1, 2])
def test_a_crowd_prefills_its_prefix_once(
    engines: list[EngineDaemon], expected: list[list[int]], engine_count: int
) -> None:
    with ThreadPoolExecutor(CROWD) as pool:
        replies = list(pool.map(lambda n: reply(engines[n % engine_count], n), range(CROWD)))
    assert [tokens for tokens, _ in replies] == expected
    assert computed([done for _, done in replies]) <= len(PREFIX) + CROWD * TAIL + RECORD


@pytest.mark.parametrize("engine_count", [1, 2])
@pytest.mark.parametrize("begun", [False, True])
def test_a_follower_goes_on_when_the_leader_is_cancelled(
    engines: list[EngineDaemon],
    expected: list[list[int]],
    cachestore: Cachestore,
    engine_count: int,
    begun: bool,
) -> None:
    with connect(engines[0].listen) as stub, ThreadPoolExecutor(CROWD) as pool:
        request = pb.GenerateRequest(prompt=ids(PREFIX + tail(0)), max_tokens=6, ignore_eos=True)
        leader = stub.Generate(request)
        until(lambda: cachestore.stats().announced == 1, "the leader to announce")
        followers = [pool.submit(reply, engines[n % engine_count], n) for n in range(1, CROWD)]
        until(lambda: cachestore.stats().waiting == CROWD - 1, "the others to wait")
        if begun:
            next(leader)
        leader.cancel()
        replies = [follower.result(timeout=60) for follower in followers]
    assert [tokens for tokens, _ in replies] == expected[1:]
    most = len(PREFIX) + CROWD * TAIL + RECORD
    assert computed([done for _, done in replies]) <= most
    stats = cachestore.stats()
    assert (stats.waiting, stats.announced) == (0, 0)


def test_a_follower_goes_on_when_the_leaders_engine_is_killed(
    engines: list[EngineDaemon], expected: list[list[int]], cachestore: Cachestore
) -> None:
    one, two = engines
    with connect(one.listen) as stub, ThreadPoolExecutor(2) as pool:
        request = pb.GenerateRequest(prompt=ids(PREFIX + tail(0)), max_tokens=6, ignore_eos=True)
        leader = stub.Generate(request)
        until(lambda: cachestore.stats().announced == 1, "the leader to announce")
        followers = [pool.submit(reply, two, n) for n in (1, 2)]
        until(lambda: cachestore.stats().waiting == 2, "the others to wait")
        one.kill()
        with pytest.raises(grpc.RpcError):
            list(leader)
        replies = [follower.result(timeout=60) for follower in followers]
    assert [tokens for tokens, _ in replies] == expected[1:3]
    assert computed([done for _, done in replies]) <= len(PREFIX) + 2 * TAIL + RECORD
