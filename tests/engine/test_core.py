"""The way of each request, driven by hand: every answer of the store comes when a test says so."""

import inspect
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from cachestore.client import MatchKind
from engine.batch import BatchMode
from engine.prefix import Prefix
from engine.request import FinishReason
from engine.rows import Occupancy
from tests.support.cores import LONG, SHORT, Driven, FakePrefix, alone


def test_the_prefix_of_these_tests_is_called_as_the_real_one() -> None:
    calls = inspect.getmembers(FakePrefix, inspect.isfunction)
    faked = {name: call for name, call in calls if not name.startswith("_")}
    assert faked.keys() > {"look_up", "copy", "pack", "write", "release"}
    for name, call in faked.items():
        real = inspect.signature(getattr(Prefix, name))
        assert list(inspect.signature(call).parameters) == list(real.parameters), name


# --- the way of one request --------------------------------------------------------------


def test_a_miss_is_computed_and_stored(driven: Driven, llama: Any) -> None:
    driven.start(1, LONG, max_tokens=4)
    driven.turn_until_idle()
    expected = alone(llama, LONG, 4)
    assert driven.deltas(1) == expected.tokens
    done = driven.done(1)
    assert done.reason is FinishReason.LENGTH
    usage = done.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (70, 0, 4)
    assert usage.match is MatchKind.MISS
    driven.check_empty()
    prompt, reply = driven.prefix.written
    assert (prompt.tokens, prompt.first) == (tuple(LONG), 0)
    assert reply.first == 70
    assert reply.tokens[:70] == tuple(LONG)
    assert list(reply.tokens[70:]) == expected.tokens[: len(reply.tokens) - 70]


def test_the_rows_that_are_stored_are_those_of_the_model(driven: Driven, llama: Any) -> None:
    driven.start(1, LONG, max_tokens=6)
    driven.turn_until_idle()
    for write in driven.prefix.written:
        caches = make_prompt_cache(llama)
        mx.eval(llama(mx.array([list(write.tokens)]), cache=caches))
        keys = np.array(caches[0].state[0][0, :, write.first : len(write.tokens)])
        np.testing.assert_allclose(write.keys, keys, atol=1e-4)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("rows", [1, 40, 69])
def test_a_hit_is_attached_block_by_block(
    driven: Driven, llama: Any, rows: int, blocks: int
) -> None:
    driven.submit(1, LONG)
    found = driven.found(LONG, rows, blocks)
    attachment: Any = found.attachment
    driven.core.looked_up(1, found)
    driven.core.turn()
    for index in range(blocks):
        ((_, block, last),) = driven.prefix.copies
        assert block is attachment.blocks[index]
        assert last == (index == blocks - 1)
        driven.copied()
    assert [part.done for part in attachment.blocks] == [["allocate", "decode"]] * blocks
    driven.turn_until_idle()
    assert driven.deltas(1) == alone(llama, LONG).tokens
    usage = driven.done(1).usage
    assert (usage.cached_tokens, usage.match) == (rows, MatchKind.PREFIX)
    assert driven.core.counters.prefilled_tokens == len(LONG) - rows
    driven.check_empty()
    # What came from the store is not written again.
    assert driven.prefix.written[0].first == rows


def test_a_copy_that_was_not_valid_is_a_miss(driven: Driven, llama: Any) -> None:
    driven.submit(1, LONG)
    driven.core.looked_up(1, driven.found(LONG, 40, blocks=2))
    driven.core.turn()
    driven.copied()
    driven.copied(valid=False)
    assert len(driven.prefix.released) == 1
    driven.turn_until_idle()
    assert driven.deltas(1) == alone(llama, LONG).tokens
    assert (driven.done(1).usage.cached_tokens, driven.done(1).usage.match) == (0, None)
    driven.check_empty()


@pytest.mark.parametrize("broken", ["allocate", "decode"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_rows_that_cannot_be_attached_are_computed(
    driven: Driven, llama: Any, broken: str, blocks: int
) -> None:
    driven.submit(1, LONG)
    driven.core.looked_up(1, driven.found(LONG, 40, blocks, broken))
    driven.core.turn()
    while driven.prefix.copies:
        driven.copied()
    driven.turn_until_idle()
    assert driven.deltas(1) == alone(llama, LONG).tokens
    assert driven.done(1).usage.cached_tokens == 0
    driven.check_empty()


def test_without_an_answer_of_the_store_there_is_no_kind_of_match(driven: Driven) -> None:
    driven.submit(1, SHORT)
    driven.core.looked_up(1, None)
    driven.turn_until_idle()
    assert driven.done(1).usage.match is None


def test_rows_that_wait_for_their_copy_take_a_place(llama: Any) -> None:
    driven = Driven(llama, rows_max=2)
    for request_id in (1, 2, 3):
        driven.submit(request_id, LONG)
        driven.core.looked_up(request_id, driven.found(LONG, 60))
    driven.core.turn()
    assert len(driven.prefix.copies) == 2
    assert driven.core.occupancy() == Occupancy(queued=1, prefilling=2, decoding=0)


def test_a_nearly_cached_prompt_does_not_take_the_place_of_a_long_one(driven: Driven) -> None:
    # Between its attachment and its first step the batch holds nothing of the first one yet.
    driven.submit(1, LONG)
    driven.core.looked_up(1, driven.found(LONG, 69))
    driven.core.turn()
    driven.start(2, LONG[::-1])
    driven.copied()
    driven.core.turn()
    assert driven.core.occupancy().queued == 0


def test_the_stages_of_a_request_add_up_to_its_time(llama: Any) -> None:
    driven = Driven(llama, rows_max=1)
    driven.start(1, SHORT, max_tokens=2)
    driven.core.turn()
    driven.submit(2, LONG, max_tokens=2)
    driven.clock.now += 2  # lookup
    driven.core.looked_up(2, driven.found(LONG, 60))
    driven.core.turn()
    driven.clock.now += 4  # queue
    driven.turn_until_idle()
    driven.clock.now += 16  # attach
    driven.copied()
    driven.clock.now += 32  # prefill
    while not driven.deltas(2):
        driven.core.turn()
    driven.clock.now += 64  # decode
    driven.turn_until_idle()
    timing = driven.done(2).timing
    assert timing.lookup_ms == pytest.approx(2_000)
    assert timing.queue_ms == pytest.approx(4_000)
    assert timing.attach_ms == pytest.approx(16_000)
    assert timing.prefill_ms == pytest.approx(32_000)
    assert timing.decode_ms == pytest.approx(64_000)


def test_one_row_at_a_time(llama: Any) -> None:
    driven = Driven(llama, rows_max=1, mode=BatchMode.ONE_ROW)
    for request_id, tokens in enumerate((LONG, SHORT, LONG[:20]), 1):
        driven.submit(request_id, tokens)
        hit = request_id == 3
        found = driven.found(tokens, len(tokens) - 2) if hit else driven.miss()
        driven.core.looked_up(request_id, found)
    for _ in range(100):
        assert driven.core.occupancy().decoding <= 1
        driven.core.turn()
        if driven.prefix.copies:
            driven.copied()
    for request_id, tokens in enumerate((LONG, SHORT, LONG[:20]), 1):
        assert driven.deltas(request_id) == alone(llama, tokens).tokens
    assert driven.done(3).usage.cached_tokens == 18
    assert {write.tokens[:3] for write in driven.prefix.written} == {
        tuple(LONG[:3]),
        tuple(SHORT),
    }
    driven.check_empty()


# --- warm --------------------------------------------------------------------------------


def test_warm_stores_the_prompt_and_says_so_when_it_is_stored(driven: Driven) -> None:
    driven.start(1, LONG, max_tokens=1, warm=True)
    driven.turn_until_idle()
    assert driven.events[1] == []
    (write,) = driven.prefix.written
    assert (write.tokens, write.first, write.report) == (tuple(LONG), 0, 1)
    # The row is free while the write is on its way.
    assert len(driven.core._batch) == 0
    driven.core.stored(1, len(LONG))
    done = driven.done(1)
    assert (done.stored_tokens, done.usage.completion_tokens) == (70, 0)
    assert driven.deltas(1) == []
    driven.check_empty()


def test_warm_says_what_is_held_when_the_write_was_dropped(driven: Driven) -> None:
    driven.submit(1, LONG, max_tokens=1, warm=True)
    driven.core.looked_up(1, driven.found(LONG, 30))
    driven.core.turn()
    driven.copied()
    driven.turn_until_idle()
    assert driven.prefix.written[0].first == 30
    driven.core.stored(1, 30)
    assert driven.done(1).stored_tokens == 30
    driven.check_empty()


@pytest.mark.parametrize("fails", ["no store", "encoding"])
def test_warm_without_a_store_ends_with_nothing_stored(driven: Driven, fails: str) -> None:
    driven.prefix.writes = fails != "no store"
    driven.prefix.fails = range(100) if fails == "encoding" else ()
    driven.start(1, LONG, max_tokens=1, warm=True)
    driven.turn_until_idle()
    assert driven.done(1).stored_tokens == 0
    assert driven.prefix.written == []
    driven.check_empty()


def test_warm_is_followed_by_nothing(driven: Driven) -> None:
    driven.start(1, LONG, max_tokens=1, warm=True)
    driven.turn_until_idle()
    driven.core.stored(1, 70)
    driven.core.stored(1, 70)
    assert driven.done(1).stored_tokens == 70
