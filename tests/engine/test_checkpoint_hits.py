"""Law 1 for models that go on from checkpoints: a hit equals a miss, wherever a prompt parts."""

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachestore.client import MatchKind
from engine import checkpoints
from engine.batch import Batch, StepResult
from engine.checkpoints import Boundaries
from engine.config import CHECKPOINT_STRIDE_MIN
from engine.found import Found
from engine.kv.kinds import NotCacheable, Snapshot
from tests.support import entries
from tests.support.daemons import Cachestore
from tests.support.engines import InProcess, assert_same, in_process
from tests.support.models import (
    gemma3_config,
    llama4_config,
    mamba2_config,
    qwen3_next_config,
    save_tiny_model,
)
from tests.support.pairs import OTHER_CUTS, SAME_CUTS, Pair, paired, prompt
from tests.support.waiting import until

STRIDE = CHECKPOINT_STRIDE_MIN

CONFIGS = {
    "gemma3_text": gemma3_config(),
    "qwen3_next": qwen3_next_config(),
    "mamba2": mamba2_config(),
    "llama4": llama4_config(),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with paired(CONFIGS[request.param], checkpoint_stride=STRIDE) as pair:
        yield pair


def test_the_same_prompt_again_is_the_same_to_the_last_bits(pair: Pair) -> None:
    tokens = prompt(1, 290)
    first = pair.stored(tokens, max_tokens=6)
    assert first.done.usage.match is MatchKind.MISS
    assert_same(first, pair.cold.ask(tokens, max_tokens=6), OTHER_CUTS)
    for _ in range(2):
        again = pair.stored(tokens, max_tokens=6)
        # What is stored ends one token before the prompt does, for the reply is short.
        assert (again.done.usage.match, again.done.usage.cached_tokens) == (MatchKind.PREFIX, 289)
        assert_same(again, first, SAME_CUTS)
    assert pair.warm.prefix.status.writes_dropped == 0


def test_a_match_is_worth_its_deepest_checkpoint(pair: Pair) -> None:
    tokens = prompt(2, 2 * STRIDE + 40)
    other = [(t + 1) % 256 for t in tokens]
    pair.stored(tokens)  # checkpoints at 256, 512 and 551
    pair.assert_served([*tokens, *other[:9]], MatchKind.PREFIX, 551)
    pair.assert_served([*tokens[:551], other[551], 3], MatchKind.PREFIX, 551)
    pair.assert_served([*tokens[:550], other[550], 3], MatchKind.LCP, 512)
    pair.assert_served([*tokens[:512], other[512]], MatchKind.LCP, 512)
    pair.assert_served([*tokens[:511], other[511]], MatchKind.LCP, 256)
    # Now there is one at 511 too.
    pair.assert_served(tokens[:512], MatchKind.SUPERSEQUENCE, 511)
    pair.assert_served([*tokens[:100], other[100]], MatchKind.MISS, 0)


def test_a_chat_goes_on_from_its_reply_and_others_from_its_system_prompt(pair: Pair) -> None:
    system = prompt(3, 90)
    tokens = [*system, *prompt(4, 60)]
    for turn in range(3):
        ends = Boundaries((90, len(tokens) - 3), 148)
        reply = pair.warm.ask(tokens, max_tokens=40, boundaries=ends)
        pair.warm.settle()
        assert reply.done.usage.cached_tokens == (0 if turn == 0 else len(tokens) - 7)
        assert_same(reply, pair.cold.ask(tokens, max_tokens=40), OTHER_CUTS)
        tokens = tokens + reply.tokens[:40] + prompt(5 + turn, 7)
    # The reply is left out: the last message is gone on from.
    again = [*tokens[:147], *prompt(9, 12)]
    pair.assert_served(again, MatchKind.PREFIX, 147)
    pair.assert_served([*system, *prompt(10, 12)], MatchKind.LCP, 90)


def test_short_turns_leave_one_state_each_and_are_served_nearly_as_much(pair: Pair) -> None:
    """Of where the next turn parts, one token before the end, and the end of the reply."""
    tokens = prompt(100, 100)
    for turn in range(3):
        before = pair.store.stats().checkpoints
        ends = Boundaries((len(tokens) - 3,), 97)
        reply = pair.warm.ask(tokens, max_tokens=8, boundaries=ends)
        pair.warm.settle()
        assert pair.store.stats().checkpoints == before + 1
        assert reply.done.usage.cached_tokens == (0 if turn == 0 else len(tokens) - 40 - 11)
        assert_same(reply, pair.cold.ask(tokens, max_tokens=8), OTHER_CUTS)
        tokens = tokens + reply.tokens[:8] + prompt(101 + turn, 40)


def test_warm_says_what_a_lookup_finds(pair: Pair) -> None:
    tokens = prompt(11, 130)
    for _ in range(2):
        reply = pair.warm.ask(tokens, max_tokens=1, warm=True)
        assert reply.done.stored_tokens == 130
    assert reply.done.usage.cached_tokens == 129
    pair.assert_served([*tokens, 7], MatchKind.PREFIX, 130)


@pytest.mark.parametrize("staggered", [False, True])
def test_hits_and_misses_of_mixed_lengths_in_one_batch(pair: Pair, staggered: bool) -> None:
    stored = prompt(12 + staggered, STRIDE + 40)
    pair.stored(stored)
    requests = [stored[:n] + prompt(20 + n, 6) for n in (17, 256, 280, 296)]
    requests += [prompt(30 + n, n) for n in (1, 2, 9, 70)]
    np.random.default_rng(staggered).shuffle(requests)
    started = []
    for tokens in requests:
        request_id = pair.warm.submit(tokens, max_tokens=6)
        if staggered:
            pair.warm.next_event(request_id)  # joins while the others decode
        started.append(request_id)
    cached = 0
    for request_id, tokens in zip(started, requests, strict=True):
        reply = pair.warm.finish(request_id)
        cached += reply.done.usage.cached_tokens
        assert_same(reply, pair.cold.alone(tokens, max_tokens=6), OTHER_CUTS)
    assert cached >= 256 + 256 + 295


def stored_bytes(pair: Pair, tokens: list[int]) -> list[str]:
    """Hashes of the records of rows, and of the checkpoint at their end."""
    found: Found = pair.warm.prefix._find((*tokens, 0), (), lambda: True)
    try:
        assert found.lease.rows == len(tokens)
        assert found.lease.checkpoint is not None
        records = entries.records(found.client, found.lease)
        return [hashlib.sha256(record).hexdigest() for record in records]
    finally:
        pair.warm.prefix.release(found)


def test_stored_bytes_are_not_changed_by_requests_that_use_them(pair: Pair) -> None:
    tokens = prompt(40, STRIDE + 60)
    pair.stored(tokens)
    lengths = (STRIDE, STRIDE + 59)
    before = [stored_bytes(pair, tokens[:length]) for length in lengths]
    # The first token comes of the prompt, and twenty of decode steps.
    started = [pair.warm.submit([*tokens[:length], 7, 8], max_tokens=21) for length in lengths]
    for request_id, length in zip(started, lengths, strict=True):
        assert pair.warm.finish(request_id).done.usage.cached_tokens == length
    pair.warm.settle()
    assert [stored_bytes(pair, tokens[:length]) for length in lengths] == before


@pytest.mark.parametrize("events", [0, 1, 4])
def test_a_cancelled_request_leaves_checkpoints_that_are_right(pair: Pair, events: int) -> None:
    tokens = prompt(50 + events, 300)
    pair.assert_right_after_cancel(tokens, prompt(60, 5), events, least=299 if events else 0)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_a_prompt_cancelled_far_from_any_checkpoint_is_served_where_it_stood(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tokens, computed, real = prompt(61, 1700), 0, Batch.step
    with paired(CONFIGS[name], prefill_step=100) as pair:

        def step(batch: Batch) -> StepResult:
            nonlocal computed
            result = real(batch)
            if computed + result.computed == 1300:
                pair.warm.engine.worker.cancel(1)
            computed += result.computed
            return result

        with monkeypatch.context() as patched:
            patched.setattr(Batch, "step", step)
            assert pair.warm.submit(tokens) == 1
            until(lambda: computed == 1300, "most of the prompt")
            pair.warm.settle()
        pair.assert_served(tokens, MatchKind.PREFIX, 1300)
        assert pair.warm.prefix.status.writes_dropped == 0


@pytest.mark.parametrize(
    "codec",
    [
        {"cache_codec": "q8"},
        # Rows before it are another record, and another reservation.
        {"cache_codec": "turbo3", "turbo_keep_first": 100},
        {"cache_codec": "q8", "cache_min_quantize_tokens": 350},
    ],
    ids=["q8", "turbo3 behind 100", "q8 from 350"],
)
def test_checkpoints_of_every_codec_are_found(
    directory: Path, cachestore: Cachestore, codec: dict[str, Any]
) -> None:
    model = save_tiny_model(directory / "model", gemma3_config())
    with in_process(model, cachestore.socket, **codec) as engine:
        tokens = prompt(70, 400)
        engine.ask(tokens, boundaries=Boundaries((60, 390), 390))
        engine.settle()
        for length, cached in ((61, 60), (91, 60), (395, 390), (400, 394)):
            reply = engine.ask([*tokens[: length - 1], 3])
            assert reply.done.usage.cached_tokens == cached
            assert np.isfinite(reply.logprobs).all()
            engine.settle()
        assert engine.prefix.status.writes_dropped == 0


@pytest.fixture
def engine(directory: Path, cachestore: Cachestore) -> Iterator[InProcess]:
    model = save_tiny_model(directory / "model", gemma3_config())
    with in_process(model, cachestore.socket, cache_codec="none") as engine:
        yield engine


def test_as_many_checkpoints_as_there_may_be_are_stored_in_one_write(
    engine: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "TOKENS_APART_MIN", 1)
    tokens = prompt(80, 70)
    ends = Boundaries(tuple(range(1, 70)), 1)
    engine.ask(tokens, max_tokens=1, boundaries=ends)
    engine.settle()
    assert engine.prefix.status.writes_dropped == 0
    assert engine.ask([*tokens, 7]).done.usage.cached_tokens == 70


@pytest.mark.parametrize("taken", [0, 1])
def test_nobody_waits_for_a_checkpoint_that_is_not_taken(
    engine: InProcess, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Only the first ones can be, of a request whose reply goes on for long."""
    tokens = prompt(90, 600)
    real, calls = engine.prefix.pack_checkpoint, itertools.count()

    def fails(snapshot: Snapshot, position: int) -> Any:
        if next(calls) >= taken:
            raise NotCacheable("a layer is not as it was")
        return real(snapshot, position)

    monkeypatch.setattr(engine.prefix, "pack_checkpoint", fails)
    ends = Boundaries((300,), 300)
    leader = engine.submit(tokens, max_tokens=100_000, boundaries=ends)
    until(
        lambda: engine.on_worker(lambda core: core._rows[leader].found is not None),
        "the leader's announcement",
    )
    follower = engine.submit(tokens, boundaries=ends)
    reply = engine.finish(follower)
    assert reply.done.usage.cached_tokens == 300 * taken
    engine.engine.worker.cancel(leader)
