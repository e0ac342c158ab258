"""An engine is killed at each step of a request: nothing of it is left in the store, and another
engine's reply is that of a cold run, from what was committed."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import EngineDaemon, InProcess, ids, in_process, start_engine
from tests.support.faulty import Death
from tests.support.models import llama_config, qwen3_next_config, save_tiny_model
from tests.support.slabs import held_slabs
from tests.support.waiting import until

CONFIGS = {"llama": llama_config(), "qwen3_next": qwen3_next_config()}
HELD = [(7 * n + n * n) % 256 for n in range(300)]
REPLY_TOKENS = 8

# Each engine attaches HELD, and then stores 300 rows more, as two records.
LOST = (
    Death("before", "cachestore.client:Client.lookup"),
    Death("after", "cachestore.client:Client.lookup"),
    Death("before", "cachestore.shm:map_slab"),  # the descriptor is not acknowledged
    Death("after", "cachestore.shm:map_slab"),
    Death("before", "engine.attach:_Landing.copy", call=3),
    Death("before", "cachestore.client:Client.renew"),
    Death("before", "cachestore.client:Client.reserve"),
    Death("after", "cachestore.client:Client.reserve"),
    Death("after", "cachestore.record:write_header"),
    Death("after", "engine.pack:write"),  # the first of two records is written
    Death("before", "cachestore.client:Client.commit"),
)
KEPT = (
    Death("after", "cachestore.client:Client.commit"),
    Death("before", "cachestore.client:Client.release"),
    Death("after", "cachestore.client:Client.release"),
)


@dataclass
class Stage:
    directory: Path
    model: Path
    store: Cachestore
    other: InProcess
    cold: InProcess
    seeds: Iterator[int]

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--cachestore", f"unix:{self.store.socket}", "--cache-codec", "none")


@pytest.fixture(scope="module", params=CONFIGS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with short_directory() as directory:
        model = save_tiny_model(directory / "model", CONFIGS[request.param])
        with (
            start_cachestore(directory) as store,
            in_process(model, store.socket, cache_codec="none") as other,
            in_process(model, None) as cold,
        ):
            other.ask(HELD)
            other.settle()
            yield Stage(directory, model, store, other, cold, itertools.count())


def request_until_death(engine: EngineDaemon, prompt: list[int]) -> None:
    with contextlib.suppress(grpc.RpcError):
        engine.generate(prompt=ids(prompt), max_tokens=REPLY_TOKENS, ignore_eos=True)
    assert engine.process.wait(timeout=10) == -9


@pytest.mark.parametrize("death", LOST + KEPT, ids=str)
def test_nothing_of_it_is_left(stage: Stage, death: Death) -> None:
    tail = np.random.default_rng(next(stage.seeds)).integers(0, 256, 300)
    prompt = HELD + [int(token) for token in tail]
    before = stage.store.stats()
    program = death.program("engine")
    with start_engine(stage.directory, stage.model, *stage.flags, program=program) as engine:
        request_until_death(engine, prompt)
    until(lambda: stage.store.stats().sessions == 1, "the session to end")
    after = stage.store.stats()
    assert (after.leases, after.reservations, after.announced) == (0, 0, 0)
    assert (after.bytes_reserved, after.bytes_quarantined, after.bytes_retiring) == (0, 0, 0)
    assert after.bytes_used + after.bytes_free == after.bytes_slabs
    if death in LOST:
        assert (after.bytes_used, after.tokens) == (before.bytes_used, before.tokens)
    if Path("/proc").exists():
        assert len(held_slabs(stage.store.pid)) == after.slabs

    reply = stage.other.ask(prompt, REPLY_TOKENS)
    assert reply.tokens == stage.cold.ask(prompt, REPLY_TOKENS).tokens
    # Of a hybrid up to the checkpoint before the last token.
    held = len(HELD) - stage.other.prefix.checkpointed
    assert reply.done.usage.cached_tokens == (len(prompt) - 1 if death in KEPT else held)
    stage.other.settle()
