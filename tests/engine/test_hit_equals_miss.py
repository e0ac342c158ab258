"""Law 1: a request served from the cache equals the same request served cold, and mlx-lm's own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachestore.client import MatchKind
from tests.support.engines import assert_same
from tests.support.models import llama_config, mistral_config, qwen3_config
from tests.support.pairs import OTHER_CUTS, SAME_CUTS, Pair, paired, prompt

RECORD = 256  # rows of a full record

CONFIGS = {
    "1 KV head": llama_config(heads=4, kv_heads=1),
    "2 KV heads": llama_config(heads=4, kv_heads=2),
    "3 KV heads": llama_config(heads=6, kv_heads=3, hidden_size=192),
    "qwen3": qwen3_config(),
    "mistral": mistral_config(),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with paired(CONFIGS[request.param]) as pair:
        yield pair


LENGTHS = (1, 2, 5, RECORD - 1, RECORD, RECORD + 1, 2 * RECORD - 1, 2 * RECORD + 1)


@pytest.mark.parametrize("shared", LENGTHS)
def test_every_kind_of_match_around_the_record_size(pair: Pair, shared: int) -> None:
    stored = prompt(shared, shared + 40)
    pair.warm.ask(stored)
    pair.warm.settle()
    other = [(t + 1) % 256 for t in stored[shared : shared + 8]]
    requests = {
        "exact": (stored, MatchKind.EXACT, len(stored) - 1),
        "prefix": (stored + prompt(1, 9), None, len(stored)),
        "lcp": (stored[:shared] + other, MatchKind.LCP, shared),
    }
    if shared > 1:
        requests["supersequence"] = (stored[:shared], MatchKind.SUPERSEQUENCE, shared - 1)
    for name, (tokens, kind, cached) in requests.items():
        reply = pair.warm.ask(tokens)
        usage = reply.done.usage
        assert (name, usage.cached_tokens) == (name, cached)
        if kind is not None:
            assert (name, usage.match) == (name, kind)
        assert_same(reply, pair.cold.ask(tokens), OTHER_CUTS)
        assert_same(reply, pair.cold.alone(tokens), OTHER_CUTS)


def test_a_hit_with_the_cuts_of_the_miss_is_the_same_to_the_last_bits(pair: Pair) -> None:
    # A prompt of one chunk and a rest is cut at the same token when the chunk comes from the store.
    step = 256
    tokens = prompt(1077, step + 30)
    pair.warm.ask([*tokens[:step], 1])
    pair.warm.settle()
    reply = pair.warm.ask(tokens)
    assert reply.done.usage.cached_tokens == step
    assert_same(reply, pair.cold.ask(tokens), SAME_CUTS)


def test_the_same_prompt_many_times(pair: Pair) -> None:
    tokens = prompt(1005, 300)
    cold = pair.cold.ask(tokens)
    for round_ in range(4):
        reply = pair.warm.ask(tokens)
        pair.warm.settle()
        assert reply.done.usage.cached_tokens == (0 if round_ == 0 else len(tokens) - 1)
        assert_same(reply, cold, OTHER_CUTS)


def test_a_chat_goes_on_from_its_reply(pair: Pair) -> None:
    tokens = prompt(1006, 50)
    for turn in range(4):
        reply = pair.warm.ask(tokens, max_tokens=20)
        pair.warm.settle()
        assert_same(reply, pair.cold.ask(tokens, max_tokens=20), OTHER_CUTS)
        assert reply.done.usage.cached_tokens == (0 if turn == 0 else len(tokens) - 7)
        tokens = tokens + reply.tokens[:20] + prompt(100 + turn, 7)


def test_a_client_that_goes_on_at_once_finds_the_rows_of_the_reply(pair: Pair) -> None:
    tokens = prompt(1007, 400)
    for turn in range(4):
        reply = pair.warm.ask(tokens, max_tokens=9)
        assert reply.done.usage.cached_tokens == (0 if turn == 0 else len(tokens) - 3)
        tokens = tokens + reply.tokens[:9] + prompt(4100 + turn, 3)


@pytest.mark.parametrize("order", range(4))
def test_hits_and_misses_of_mixed_lengths_in_one_batch(pair: Pair, order: int) -> None:
    stored = prompt(1200 + order, 600)
    pair.warm.ask(stored)
    pair.warm.settle()
    requests = [stored[:n] + prompt(2000 + order * 50 + n, 6) for n in (3, 16, 17, 40, 300, 599)]
    requests += [prompt(3000 + order * 60 + n, n) for n in (1, 2, 9, 70, 280)]
    np.random.default_rng(order).shuffle(requests)
    started = []
    for tokens in requests:
        request_id = pair.warm.submit(tokens, max_tokens=8)
        if order % 2:
            pair.warm.next_event(request_id)  # joins while the others decode
        started.append(request_id)
    for request_id, tokens in zip(started, requests, strict=True):
        reply = pair.warm.finish(request_id)
        assert_same(reply, pair.cold.alone(tokens, max_tokens=8), OTHER_CUTS)


@pytest.mark.parametrize("leave_after", [0, 1, 5])
def test_a_cancelled_request_leaves_rows_that_are_right(pair: Pair, leave_after: int) -> None:
    tokens = prompt(1300 + leave_after, 290)
    least = len(tokens) if leave_after else 0
    pair.assert_right_after_cancel(tokens, prompt(9, 5), leave_after, least)


def test_stored_rows_are_not_changed_by_requests_that_use_them(pair: Pair, tmp_path: Path) -> None:
    tokens = prompt(1400, 520)
    pair.warm.ask(tokens)
    pair.warm.settle()

    def stored_bytes() -> list[bytes]:
        found = pair.warm.prefix._find(tuple(tokens), (), lambda: True)
        try:
            return [bytes(found.client.record(span)) for span in found.lease.spans]
        finally:
            pair.warm.prefix.release(found)

    before = stored_bytes()
    for length in (520, 300, 17):
        # The first token comes of the prompt, and twenty of decode steps.
        pair.warm.ask([*tokens[:length], 7], max_tokens=21)
    pair.warm.settle()
    assert stored_bytes() == before
