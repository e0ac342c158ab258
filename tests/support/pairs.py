"""Two engines on the same weights, one with a store and one without: a hit beside its miss."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cachestore.client import MatchKind
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import InProcess, Reply, assert_same, in_process
from tests.support.models import Config, save_tiny_model

# What float noise explains: with the same cuts of the prompt, and otherwise.
SAME_CUTS = 1e-5
OTHER_CUTS = 2e-4


@dataclass
class Pair:
    warm: InProcess
    cold: InProcess
    store: Cachestore

    def stored(self, tokens: list[int], max_tokens: int = 1) -> Reply:
        reply = self.warm.ask(tokens, max_tokens)
        self.warm.settle()
        return reply

    def assert_served(self, tokens: list[int], kind: MatchKind, cached: int) -> None:
        """A request is served so, and as if it were cold."""
        reply = self.warm.ask(tokens)
        self.warm.settle()
        usage = reply.done.usage
        assert (usage.match, usage.cached_tokens) == (kind, cached)
        assert_same(reply, self.cold.ask(tokens), OTHER_CUTS)

    def assert_right_after_cancel(
        self, tokens: list[int], more: list[int], events: int, least: int
    ) -> None:
        """A request that is cancelled after so many events leaves at least so many rows cached,
        and what goes on from its prompt is as if it were cold."""
        request_id = self.warm.submit(tokens, max_tokens=400)
        for _ in range(events):
            self.warm.next_event(request_id)
        self.warm.engine.worker.cancel(request_id)
        self.warm.settle()
        longer = [*tokens, *more]
        reply = self.warm.ask(longer)
        assert reply.done.usage.cached_tokens >= least
        assert_same(reply, self.cold.ask(longer), OTHER_CUTS)


@contextlib.contextmanager
def paired(config: Config, **settings: Any) -> Iterator[Pair]:
    """`settings` are of the engine with the store, whose codec is lossless."""
    with short_directory() as directory:
        model = save_tiny_model(directory / "model", config)
        with (
            start_cachestore(directory, budget="256MiB") as store,
            in_process(model, store.socket, cache_codec="none", **settings) as warm,
            in_process(model, None) as cold,
        ):
            yield Pair(warm, cold, store)


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, length)]
