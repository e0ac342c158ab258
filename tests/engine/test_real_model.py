"""Law 1 on SmolLM2: the store's rows and mlx-lm's own generation agree on a trained model."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.daemons import short_directory, start_cachestore
from tests.support.engines import InProcess, assert_same, in_process
from tests.support.smollm2 import smollm2_folder

pytestmark = pytest.mark.real_model

TEXT = (
    "The lighthouse keeper wrote down the weather every morning. On Monday the wind came from "
    "the west and the sea was calm. On Tuesday it turned, and by noon the first boats came home. "
) * 8


@dataclass
class Served:
    engine: InProcess
    tokens: list[int]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with (
        short_directory() as directory,
        start_cachestore(directory, budget="256MiB") as store,
        in_process(smollm2_folder(), store.socket, cache_codec="none") as engine,
    ):
        assert engine.engine.served is not None
        tokens = engine.engine.served.encoder.encode_text(TEXT)
        assert len(tokens) > 300
        yield Served(engine, tokens[:300])


def test_every_kind_of_match_equals_mlx_lm(served: Served) -> None:
    tokens = served.tokens
    engine = served.engine
    cold = engine.ask(tokens, max_tokens=12)
    assert cold.done.usage.cached_tokens == 0
    assert_same(cold, engine.alone(tokens, 12), 1e-5)
    engine.settle()
    requests = {
        "exact": (tokens, 299),
        "prefix": (tokens + tokens[40:60], 300),
        "supersequence": (tokens[:257], 256),
        "lcp": (tokens[:256] + tokens[100:120], 256),
    }
    for name, (request, cached) in requests.items():
        reply = engine.ask(request, max_tokens=12)
        assert (name, reply.done.usage.cached_tokens) == (name, cached)
        assert_same(reply, engine.alone(request, 12), 2e-4)


def test_hits_and_misses_joined_in_one_batch_equal_mlx_lm(served: Served) -> None:
    tokens = served.tokens
    engine = served.engine
    engine.ask(tokens, max_tokens=1)
    engine.settle()
    requests = [tokens[:200] + tokens[7:12], tokens[3:40], tokens, tokens[:17], tokens[5:150]]
    started = []
    for request in requests:
        started.append(engine.submit(request, max_tokens=8))
        engine.next_event(started[-1])
    for request_id, request in zip(started, requests, strict=True):
        assert_same(engine.finish(request_id), engine.alone(request, 8), 2e-4)
