"""Lookups that wait for the rows of others, and requests that end meanwhile."""

import pytest

from cachestore.client import MatchKind
from engine import config
from engine.storing import packed_tokens
from tests.support.daemons import short_directory, start_cachestore
from tests.support.engines import in_process
from tests.support.models import llama_config, save_tiny_model
from tests.support.waiting import until

SHARED = [(7 * n + 3) % 256 for n in range(600)]
OTHER = [(11 * n + 5) % 256 for n in range(40)]


def test_cancelled_requests_do_not_hold_up_the_lookups_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "QUEUE_REQUESTS_MAX", 2)
    with (
        short_directory() as directory,
        start_cachestore(directory) as store,
        in_process(
            save_tiny_model(directory / "model", llama_config()), store.socket, cache_codec="none"
        ) as engine,
        store.client() as leader,
    ):
        cold = engine.alone(OTHER)
        # Somebody computes the prefix, and takes its time.
        leader.lookup(
            engine.prefix.status.namespace, packed_tokens(tuple(SHARED)), len(SHARED), True
        )
        waiting = [engine.submit([*SHARED, number]) for number in range(2)]
        until(lambda: store.stats().waiting == 2, "both to wait")
        queued = engine.submit([*SHARED, 2])
        for request_id in (*waiting, queued):
            engine.engine.worker.cancel(request_id)
        reply = engine.ask(OTHER)
        assert reply.done.usage.match is MatchKind.MISS
        assert reply.tokens == cold.tokens
        until(lambda: store.stats().waiting == 0, "nobody to wait")
        assert store.stats().lookups.miss == 2, "of one that nobody wanted any more"
        assert engine.prefix.status.connected
