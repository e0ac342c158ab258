"""Checkpoints that a request takes, step by step: each is exactly the state at its position,
whatever runs beside, and no row is stored that none of them reaches."""

from collections.abc import Sequence
from typing import Any

import pytest

from cachestore.config import CHECKPOINTS_PER_CALL_MAX
from engine import checkpoints, writeback
from engine.batch import Batch, BatchMode
from engine.checkpoints import Boundaries
from engine.scheduler import Scheduler
from tests.support.checkpoints import Alone
from tests.support.cores import LONG, SHORT, Driven, Write, alone
from tests.support.models import (
    gemma3_config,
    llama4_config,
    nemotron_h_config,
    qwen3_next_config,
    tiny_model,
)

PIECE = 8
OTHER = [(7 * n + 3) % 256 for n in range(55)]
ENDS = (20, 60)
# Every 32 tokens, where others part, and one before the end.
PLANNED = (20, 32, 60, 64, 69)

MODES = {
    "gemma3_text": (gemma3_config(), BatchMode.BATCHED),
    "qwen3_next": (qwen3_next_config(), BatchMode.BATCHED),
    "nemotron_h": (nemotron_h_config(), BatchMode.PREFILL_ONE),
    "llama4": (llama4_config(), BatchMode.ONE_ROW),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every checkpoint is taken, however close to another one."""
    monkeypatch.setattr(writeback, "PIECE_ROWS", PIECE)
    monkeypatch.setattr(checkpoints, "TOKENS_APART_MIN", 1)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: tiny_model(config) for name, (config, _) in MODES.items()}


@pytest.fixture(params=MODES)
def of_a_kind(request: pytest.FixtureRequest, models: dict[str, Any]) -> Driven:
    mode = MODES[request.param][1]
    return Driven(models[request.param], 1 if mode is BatchMode.ONE_ROW else 4, mode)


@pytest.fixture
def hybrid(models: dict[str, Any]) -> Driven:
    return Driven(models["qwen3_next"])


def start(driven: Driven, request_id: int, tokens: Sequence[int], **fields: Any) -> None:
    driven.start(request_id, tokens, boundaries=Boundaries(ENDS, 60), **fields)


def writes_of(driven: Driven, tokens: Sequence[int]) -> list[Write]:
    return [write for write in driven.prefix.written if write.tokens[:2] == tuple(tokens[:2])]


def positions(writes: Sequence[Write]) -> list[int]:
    return [each.position for write in writes for each in write.checkpoints]


def check(driven: Driven, tokens: Sequence[int], reply: Sequence[int], first: int = 0) -> list[int]:
    """Every row once, none behind the last checkpoint of its write, and every state exact; where
    checkpoints were taken."""
    path = (*tokens, *reply)
    alone = Alone(driven.model, driven.prefix.layout, path)
    for write in writes_of(driven, tokens):
        assert write.first == first
        assert write.tokens == path[: len(write.tokens)]
        first = len(write.tokens)
        assert write.checkpoints[-1].position == first
        for each in write.checkpoints:
            alone.check(each)
    return positions(writes_of(driven, tokens))


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_positions_of_a_prompt_and_the_end_of_its_reply(of_a_kind: Driven, max_tokens: int) -> None:
    driven = of_a_kind
    start(driven, 1, LONG, max_tokens=max_tokens)
    driven.turn_until_idle()
    assert driven.deltas(1) == alone(driven.model, LONG, max_tokens).tokens
    # Of a reply of one token nothing was fed.
    end = len(LONG) + (max_tokens if max_tokens > 1 else 0)
    assert check(driven, LONG, driven.deltas(1)) == [*PLANNED, end]
    assert [len(write.tokens) for write in writes_of(driven, LONG)] == (
        [70] if max_tokens == 1 else [69, end]
    )
    assert all(write.conversation_start == 60 for write in driven.prefix.written)
    driven.check_empty()


@pytest.mark.parametrize("apart", [0, 3])
def test_prompts_beside_each_other_and_beside_replies(of_a_kind: Driven, apart: int) -> None:
    driven = of_a_kind
    prompts = [LONG, SHORT, OTHER, LONG[::-1][:33]]
    for request_id, tokens in enumerate(prompts):
        start(driven, request_id, tokens, max_tokens=4 + 3 * request_id)
        for _ in range(apart):
            driven.core.turn()
    driven.turn_until_idle()
    for request_id, tokens in enumerate(prompts):
        reply = driven.deltas(request_id)
        assert reply == alone(driven.model, tokens, 4 + 3 * request_id).tokens
        taken = check(driven, tokens, reply)
        ends = [end for end in (*ENDS, 32, 64) if end < len(tokens)]
        assert taken == sorted({*ends, len(tokens) - 1, len(tokens) + len(reply)})
    driven.check_empty()


@pytest.mark.parametrize("cached", [20, 59, 69])
def test_behind_a_hit_only_those_beyond_it_are_taken(of_a_kind: Driven, cached: int) -> None:
    driven = of_a_kind
    fields = {"max_tokens": 6, "boundaries": Boundaries(ENDS, 60)}
    driven.start_behind(1, LONG, cached, **fields)
    driven.turn_until_idle()
    assert driven.deltas(1) == alone(driven.model, LONG, 6).tokens
    taken = check(driven, LONG, driven.deltas(1), first=cached)
    assert taken == [*(p for p in PLANNED if p > cached), 76]
    driven.check_empty()


@pytest.mark.parametrize(("cached", "valid"), [(0, True), (20, True), (20, False)])
def test_one_more_is_taken_where_others_part(of_a_kind: Driven, cached: int, valid: bool) -> None:
    """Also when the hit turns out to be none."""
    driven, parting = of_a_kind, 45
    driven.submit(1, LONG, max_tokens=6, boundaries=Boundaries(ENDS, 60))
    if cached:
        driven.core.looked_up(1, driven.found(LONG, cached, parting=parting))
        driven.core.turn()
        driven.copied(valid)
    else:
        driven.core.looked_up(1, driven.miss(parting))
    driven.turn_until_idle()
    assert driven.deltas(1) == alone(driven.model, LONG, 6).tokens
    first = cached if valid else 0
    taken = check(driven, LONG, driven.deltas(1), first)
    assert taken == [*sorted(p for p in (*PLANNED, parting) if p > first), 76]
    driven.check_empty()


def test_a_warm_prompt_is_one_write_to_its_end(of_a_kind: Driven) -> None:
    driven = of_a_kind
    start(driven, 1, LONG, max_tokens=1, warm=True)
    driven.turn_until_idle()
    (write,) = driven.prefix.written
    assert (len(write.tokens), write.report) == (70, 1)
    assert check(driven, LONG, []) == [*PLANNED, 70]
    driven.core.stored(1, 70)
    assert driven.done(1).stored_tokens == 70
    driven.check_empty()


@pytest.mark.parametrize("max_tokens", [1, 5, 6])
@pytest.mark.parametrize(("cached", "taken"), [(20, [32, 60, 69]), (69, [])])
def test_a_reply_of_a_few_tokens_is_not_worth_a_checkpoint(
    of_a_kind: Driven, monkeypatch: pytest.MonkeyPatch, max_tokens: int, cached: int, taken: Any
) -> None:
    monkeypatch.setattr(checkpoints, "TOKENS_APART_MIN", 7)
    driven, fields = of_a_kind, {"max_tokens": max_tokens, "boundaries": Boundaries(ENDS, 60)}
    driven.start_behind(1, LONG, cached, **fields)
    driven.turn_until_idle()
    end = [76] if max_tokens == 6 else []
    assert check(driven, LONG, driven.deltas(1), first=cached) == [*taken, *end]
    assert driven.prefix.given_up == 0
    driven.check_empty()


def test_a_model_of_rows_alone_stops_nowhere(driven: Driven, monkeypatch: Any) -> None:
    stops = []
    insert = Batch.insert

    def noted(self: Batch, *args: Any) -> int:
        stops.append(args[5])
        return insert(self, *args)

    monkeypatch.setattr(Batch, "insert", noted)
    start(driven, 1, LONG)
    driven.turn_until_idle()
    assert stops == [[]]
    assert driven.prefix.snapshots == 0
    assert [len(write.tokens) for write in driven.prefix.written] == [70, 73]


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "beside"),
    [*((turns, False) for turns in range(14)), *((turns, True) for turns in (2, 6, 9, 12))],
)
def test_a_request_cancelled_after_any_turn(hybrid: Driven, turns: int, beside: bool) -> None:
    driven = hybrid
    if beside:
        driven.start(2, SHORT, max_tokens=20)
        driven.core.turn()
    start(driven, 1, LONG, max_tokens=100)
    for _ in range(turns):
        driven.core.turn()
    uid = driven.core._rows[1].uid
    held = 0 if uid is None else driven.core._batch.held(uid)
    driven.core.cancel(1)
    driven.turn_until_idle()
    taken = check(driven, LONG, driven.deltas(1))
    # Exactly what was computed, with a checkpoint at its end.
    assert (taken[-1] if taken else 0) == held
    assert set(taken[:-1]) <= {*PLANNED}
    if beside:
        assert check(driven, SHORT, driven.deltas(2))[-1] == 23
    driven.check_empty()


def test_of_a_request_cancelled_close_behind_a_checkpoint_that_one_is_the_last(
    hybrid: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "TOKENS_APART_MIN", 17)
    start(hybrid, 1, LONG, max_tokens=100)
    while hybrid.core.counters.prefilled_tokens < 32:
        hybrid.core.turn()
    assert hybrid.core._batch.held(0) == 36
    hybrid.core.cancel(1)
    hybrid.check_empty()
    assert check(hybrid, LONG, []) == [20]


def test_a_prompt_that_is_cancelled_while_it_is_packed_is_stored_whole(hybrid: Driven) -> None:
    hybrid.start(2, SHORT, max_tokens=60)
    hybrid.core.turn()
    start(hybrid, 1, LONG, max_tokens=100)
    while hybrid.core._rows[1].packed_to < 3 * PIECE:
        hybrid.core.turn()
    hybrid.core.cancel(1)
    hybrid.turn_until_idle()
    reply = hybrid.deltas(1)
    assert check(hybrid, LONG, reply) == [*PLANNED, len(LONG) + len(reply)]
    assert [len(write.tokens) for write in writes_of(hybrid, LONG)] == [69, 70 + len(reply)]
    hybrid.check_empty()


@pytest.fixture(scope="module")
def reply(models: dict[str, Any]) -> list[int]:
    return alone(models["qwen3_next"], LONG, 12).tokens


# Five checkpoints, then nine pieces of the prompt, one of the reply, its end, and the rest.
@pytest.mark.parametrize("call", range(17))
def test_a_copy_or_a_piece_that_fails_costs_what_follows_it_at_most(
    hybrid: Driven, reply: list[int], call: int
) -> None:
    hybrid.prefix.fails = {call}
    start(hybrid, 1, LONG, max_tokens=12)
    hybrid.turn_until_idle()
    assert hybrid.deltas(1) == reply
    taken = check(hybrid, LONG, reply)
    assert {*taken} < {*PLANNED, 82}
    # Without the checkpoint at the end of the reply, its rows are of no use; and without the last
    # one of the prompt its write is shorter than was announced.
    assert hybrid.prefix.given_up == (0 if {69, 82} <= {*taken} else 1)
    hybrid.check_empty()


def test_without_room_the_deepest_checkpoint_stays(hybrid: Driven, reply: list[int]) -> None:
    hybrid.prefix.room_bytes = 2000  # of two
    start(hybrid, 1, LONG, max_tokens=12)
    hybrid.turn_until_idle()
    # The prompt's are with the writer before that of the reply is taken.
    assert check(hybrid, LONG, reply) == [20, 69, 82]
    hybrid.prefix.written.clear()
    hybrid.prefix.room_bytes = 0  # as when others keep as much as there is room for
    start(hybrid, 2, LONG, max_tokens=12)
    hybrid.turn_until_idle()
    assert hybrid.deltas(2) == reply
    assert check(hybrid, LONG, reply) == [69, 82]
    hybrid.check_empty()


def test_rows_that_stop_in_the_same_step_share_the_room(hybrid: Driven) -> None:
    hybrid.core.scheduler = Scheduler(4, True, 1000)  # admits both at once
    hybrid.prefix.room_bytes = 3000
    prompts = (LONG, LONG[::-1])
    for request_id, tokens in enumerate(prompts):
        start(hybrid, request_id, tokens, max_tokens=40)
    while not hybrid.prefix.written:
        hybrid.core.turn()
        kept = [len(row.checkpoints) for row in hybrid.core._rows.values()]
        assert sum(kept) <= 3
    hybrid.turn_until_idle()
    # The first of them was first.
    assert check(hybrid, LONG, hybrid.deltas(0)) == [20, 69, 110]
    assert check(hybrid, LONG[::-1], hybrid.deltas(1)) == [69, 110]
    hybrid.check_empty()


@pytest.mark.parametrize(("room_bytes", "taken"), [(2000, [20, 72]), (0, [72])])
def test_a_prompt_whose_checkpoint_makes_room_for_the_reply_is_not_written_up_to_it(
    hybrid: Driven, room_bytes: int, taken: list[int]
) -> None:
    hybrid.prefix.room_bytes = room_bytes
    start(hybrid, 1, LONG, max_tokens=2)  # over before the prompt is packed
    hybrid.turn_until_idle()
    assert check(hybrid, LONG, hybrid.deltas(1)) == taken
    hybrid.check_empty()


@pytest.mark.parametrize(
    ("fails", "stored", "given_up"), [((), [69], 0), ({4}, [64], 1), (range(5), [], 1)]
)
def test_a_promise_that_cannot_be_kept_is_taken_back_while_the_reply_goes_on(
    hybrid: Driven, fails: Any, stored: list[int], given_up: int
) -> None:
    hybrid.prefix.fails = fails
    start(hybrid, 1, LONG, max_tokens=100)
    while len(hybrid.deltas(1)) < 20:
        hybrid.core.turn()
    assert [len(write.tokens) for write in hybrid.prefix.written] == stored
    assert hybrid.prefix.given_up == given_up
    hybrid.core.cancel(1)
    hybrid.check_empty()


def test_a_promise_is_taken_back_when_nothing_can_be_written(hybrid: Driven) -> None:
    hybrid.prefix.writes = False
    start(hybrid, 1, LONG, max_tokens=100)
    while not hybrid.deltas(1):
        hybrid.core.turn()
    assert hybrid.prefix.given_up == 1
    hybrid.core.cancel(1)
    hybrid.check_empty()


@pytest.mark.parametrize("length", [65, 66, 67, 128])
def test_a_write_has_no_more_checkpoints_than_the_store_takes(hybrid: Driven, length: int) -> None:
    """The end of a reply of one token is that of its prompt, and goes with it."""
    hybrid.submit(1, (LONG * 2)[:length], max_tokens=1, boundaries=Boundaries((*range(2, length),)))
    hybrid.core.looked_up(1, hybrid.miss(parting=1))
    hybrid.turn_until_idle()
    (write,) = hybrid.prefix.written
    assert len(write.tokens) == length
    assert len(write.checkpoints) == CHECKPOINTS_PER_CALL_MAX
    hybrid.check_empty()


@pytest.mark.parametrize("turns", [0, 3, 6, 9])
def test_a_store_that_goes_away_and_comes_back(
    hybrid: Driven, reply: list[int], turns: int
) -> None:
    start(hybrid, 1, LONG, max_tokens=12)
    for _ in range(turns):
        hybrid.core.turn()
    hybrid.prefix.writes = False
    hybrid.core.turn()
    hybrid.prefix.writes = True
    hybrid.turn_until_idle()
    assert hybrid.deltas(1) == reply
    taken = check(hybrid, LONG, hybrid.deltas(1))
    assert taken[-1] == 82
    assert {*taken} <= {*PLANNED, 82}
    hybrid.check_empty()


def test_a_broken_step_leaves_no_checkpoint_behind(hybrid: Driven) -> None:
    start(hybrid, 1, LONG, max_tokens=12)
    while hybrid.prefix.snapshots < 3:
        hybrid.core.turn()

    def broken() -> Any:
        raise RuntimeError("no memory")

    hybrid.core._batch.step = broken  # type: ignore[method-assign]
    hybrid.core.turn()
    assert hybrid.failed(1)
    assert hybrid.prefix.written == []
    start(hybrid, 2, OTHER, max_tokens=4)
    hybrid.turn_until_idle()
    assert check(hybrid, OTHER, hybrid.deltas(2))[-1] == 59
    hybrid.check_empty()
