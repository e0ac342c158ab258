"""The cachestore is killed at each step of a request: the reply is that of a cold run, the next
one too, and the daemon that takes its place is used."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cachestore import record
from engine import attach
from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.support import entries
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import EngineDaemon, ids, in_process, start_engine
from tests.support.faulty import Death
from tests.support.models import llama_config, qwen3_next_config, save_tiny_model
from tests.support.waiting import until

HELD = [(7 * n + n * n) % 256 for n in range(300)]
PROMPT = HELD + [(3 * n + n * n * n) % 256 for n in range(300)]
LAST = len(PROMPT) - 1
REPLY_TOKENS = 8
CODEC = "none"

# Of rows alone, and with a checkpoint, which ends one token before HELD does, and before PROMPT.
CONFIGS = {"llama": llama_config(), "qwen3_next": qwen3_next_config()}

# Storing HELD made the first of each of these calls, and two to reserve: one asked for a slab.
STEPS = (
    Death("before", "cachestore.store:Store.lookup", call=2),
    Death("after", "cachestore.store:Store.lookup", call=2),
    # Of a lease: a session that has none asks now and then, too, which slabs it can give back.
    Death("before", "cachestore.lease:Claims.renew"),
    Death("after", "cachestore.lease:Claims.renew"),
    Death("before", "cachestore.store:Store.reserve", call=3),
    Death("after", "cachestore.store:Store.reserve", call=3),
    Death("before", "cachestore.store:Store.commit", call=2),
    Death("after", "cachestore.store:Store.commit", call=2),
    Death("before", "cachestore.store:Store.release", call=2),
    Death("after", "cachestore.store:Store.release", call=2),
)
HANDOVERS = (
    Death("before", "cachestore.retirement:Retirement.give", call=2),
    Death("after", "cachestore.retirement:Retirement.give", call=2),
)
EVICTIONS = 4
EVICTION = (
    Death("before", "cachestore.holdings:Holdings.drop", call=EVICTIONS + 1),
    Death("after", "cachestore.holdings:Holdings.drop", call=EVICTIONS + 1),
)


@dataclass
class Stage:
    directory: Path
    model: Path
    engine: EngineDaemon
    cold: list[int]

    def ask(self) -> tuple[list[int], pb.Usage]:
        tokens, _, done = self.engine.generate(
            prompt=ids(PROMPT), max_tokens=REPLY_TOKENS, ignore_eos=True
        )
        return tokens, done.usage

    def check_death(self, dying: Cachestore) -> None:
        """The next request ends it, and is answered like one after that."""
        assert self.ask()[0] == self.cold
        assert dying.process.wait(timeout=10) == -9
        tokens, usage = self.ask()
        assert tokens == self.cold
        assert usage.match == pb.CACHE_MATCH_UNAVAILABLE

    def check_replacement(self) -> None:
        """Another daemon takes the place: at first a miss, which is stored, then a hit."""
        with start_cachestore(self.directory) as replacement:
            until(lambda: replacement.stats().sessions == 1, "the engine to come back")
            assert self.ask()[0] == self.cold
            until(lambda: replacement.stats().tokens >= LAST, "the prompt to be stored")
            tokens, usage = self.ask()
            assert usage.cached_tokens == LAST
            assert tokens == self.cold


@pytest.fixture(scope="module", params=CONFIGS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with short_directory() as directory:
        model = save_tiny_model(directory / "model", CONFIGS[request.param])
        with in_process(model, None) as engine:
            cold = engine.ask(PROMPT, REPLY_TOKENS).tokens
        where = f"unix:{directory / 'cachestore.sock'}"
        flags = ("--cachestore", where, "--cache-codec", CODEC)
        with start_engine(directory, model, *flags) as daemon:
            with connect(daemon.listen) as stub:
                until(lambda: stub.GetModel(pb.GetModelRequest()).namespace, "the digest")
            yield Stage(directory, model, daemon, cold)


def wait_stored(store: Cachestore) -> None:
    def stored() -> bool:
        stats = store.stats()
        return stats.tokens >= len(HELD) - 1 and stats.leases == stats.reservations == 0

    until(stored, "the rows to be stored")


@pytest.mark.parametrize("death", STEPS, ids=str)
def test_in_a_call(stage: Stage, death: Death) -> None:
    with start_cachestore(stage.directory, program=death.program("cachestore")) as dying:
        until(lambda: dying.stats().sessions == 1, "the engine to come")
        stage.engine.generate(prompt=ids(HELD), max_tokens=1)
        wait_stored(dying)
        stage.check_death(dying)
    stage.check_replacement()


@pytest.mark.parametrize("death", HANDOVERS, ids=str)
def test_while_it_hands_over_a_slab(stage: Stage, death: Death) -> None:
    with start_cachestore(stage.directory, program=death.program("cachestore")) as dying:
        with in_process(stage.model, dying.socket, cache_codec=CODEC) as other:
            assert other.ask(HELD, 1).tokens
            other.settle()
        until(lambda: dying.stats().sessions == 1, "the engine to come, and the other to go")
        stage.check_death(dying)
    stage.check_replacement()


@pytest.mark.parametrize("death", EVICTION, ids=str)
def test_while_it_evicts(stage: Stage, death: Death) -> None:
    with start_cachestore(
        stage.directory, program=death.program("cachestore"), budget="16MiB"
    ) as dying:
        until(lambda: dying.stats().sessions == 1, "the engine to come")
        with dying.client(role="admin") as client:
            first = 0
            while client.stats().evictions < EVICTIONS:
                entries.write(client, entries.tokens(200, first))
                first += 1000
        stage.check_death(dying)
    stage.check_replacement()


@pytest.mark.parametrize(
    ("owner", "function"),
    [(attach._Landing, "copy"), (record, "write_header")],
    ids=["from a slab", "to a slab"],
)
def test_in_the_middle_of_a_copy(
    stage: Stage, directory: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, function: str
) -> None:
    with (
        start_cachestore(directory) as store,
        in_process(stage.model, store.socket, cache_codec=CODEC) as engine,
    ):
        engine.ask(HELD, 1)
        engine.settle()
        step = getattr(owner, function)

        def kill_and_go_on(*arguments: Any) -> None:
            step(*arguments)
            store.kill()

        monkeypatch.setattr(owner, function, kill_and_go_on)
        assert engine.ask(PROMPT, REPLY_TOKENS).tokens == stage.cold
        engine.settle()
        assert store.process.returncode == -9
        assert engine.prefix.status.writes_committed == 1
        assert engine.ask(PROMPT, REPLY_TOKENS).tokens == stage.cold
