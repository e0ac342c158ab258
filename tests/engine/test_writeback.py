"""What leaves the batch for the store, and when: pieces of a few rows, after each step one."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from engine import writeback
from engine.batch import Batch, StepResult
from engine.rows import State
from tests.support.cores import ENCODED_TOKENS_MIN, LONG, SHORT, STEP, Driven, Write, alone
from tests.support.daemons import Cachestore
from tests.support.engines import in_process
from tests.support.models import save_tiny_model

PIECE = 8


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "PIECE_ROWS", PIECE)


def of(driven: Driven, tokens: list[int]) -> list[Write]:
    """The writes of one request."""
    return [write for write in driven.prefix.written if write.tokens[:2] == tuple(tokens[:2])]


def check(driven: Driven, tokens: list[int], reply: list[int]) -> int:
    """Each row is written once, in order, under its own tokens; how many are."""
    path = (*tokens, *reply)
    position = 0
    for write in of(driven, tokens):
        assert write.first == position
        position = len(write.tokens)
        assert write.tokens == path[:position]
    return position


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a stream"])
def test_all_rows_of_a_reply_are_written_once(
    driven: Driven, llama: Any, max_tokens: int, beside: bool
) -> None:
    if beside:
        driven.start(2, SHORT, max_tokens=100)
        driven.core.turn()
    driven.start(1, LONG, max_tokens=max_tokens)
    driven.turn_until_idle()
    reply = alone(llama, LONG, max_tokens).tokens
    assert driven.deltas(1) == reply
    # The last token was never fed, and one that was may be missing.
    assert check(driven, LONG, reply) >= len(LONG) + max_tokens - 1
    assert of(driven, LONG)[0].tokens == tuple(LONG)
    if beside:
        assert driven.deltas(2) == alone(llama, SHORT, 100).tokens
    driven.check_empty()


@pytest.mark.parametrize("length", [ENCODED_TOKENS_MIN - n for n in (20, 12, 9, 4, 1, 0)])
def test_a_reply_that_makes_a_path_long_enough_to_encode_is_of_one_codec(
    driven: Driven, llama: Any, length: int
) -> None:
    tokens = (LONG * 2)[5 : 5 + length]
    driven.start(2, SHORT, max_tokens=100)
    driven.start(1, tokens, max_tokens=40)
    driven.turn_until_idle()
    assert check(driven, tokens, driven.deltas(1)) >= length + 39
    assert [write.encoded for write in of(driven, tokens)] == [length >= ENCODED_TOKENS_MIN, True]
    assert check(driven, SHORT, driven.deltas(2)) >= len(SHORT) + 99


@pytest.mark.parametrize("packed", [2, 3, 5])
def test_a_cancelled_reply_is_of_one_codec_too(driven: Driven, packed: int) -> None:
    driven.start(1, SHORT, max_tokens=150)
    while driven.prefix.packs < packed:
        driven.core.turn()
    driven.core.cancel(1)
    driven.check_empty()
    assert check(driven, SHORT, driven.deltas(1)) > len(SHORT)


def test_a_stream_goes_on_while_a_row_that_is_over_is_packed(driven: Driven) -> None:
    driven.start(2, SHORT, max_tokens=200)
    driven.core.turn()
    driven.start(1, LONG, max_tokens=1)
    while driven.last(1) is None:
        driven.core.turn()
    packs = driven.prefix.packs
    streamed = len(driven.deltas(2))
    steps = 0
    while 1 in driven.core._rows:
        assert driven.core._rows[1].state is State.LEAVING
        driven.core.turn()
        steps += 1
        assert driven.prefix.packs - packs <= steps
    assert steps >= len(LONG) // PIECE - 1
    assert len(driven.deltas(2)) - streamed == steps


def test_rows_that_are_over_take_no_step_when_nobody_waits(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are packed a piece in each turn, and leave."""
    for request_id in (1, 2):
        driven.start(request_id, LONG[request_id:], max_tokens=1)
    while driven.last(1) is None or driven.last(2) is None:
        driven.core.turn()
    computed, turns = driven.core.counters.prefilled_tokens, 0

    def step(batch: Batch) -> StepResult:
        driven.core.counters.prefilled_tokens += 1
        return StepResult((), 0)

    monkeypatch.setattr(Batch, "step", step)
    while driven.core.turn():
        turns += 1
    assert turns >= len(LONG) // PIECE
    assert driven.core.counters.prefilled_tokens == computed
    assert len(driven.core) == 0
    assert len(driven.prefix.written) == 2


def test_short_pieces_of_several_rows_are_packed_between_two_steps(driven: Driven) -> None:
    for request_id in range(1, 5):
        driven.start(request_id, LONG[request_id:][: PIECE // 4], max_tokens=100)
    while not driven.deltas(1):
        driven.core.turn()
    assert all(driven.deltas(request_id) for request_id in range(1, 5))
    # The prompts, all in the turn of their first tokens.
    assert len(driven.prefix.written) == 4


@pytest.mark.parametrize("ending", ["cancel", "fail", "broken step", "no store"])
@pytest.mark.parametrize("warm", [False, True])
def test_what_ends_a_row_while_it_is_packed(driven: Driven, ending: str, warm: bool) -> None:
    driven.start(2, SHORT, max_tokens=200)
    driven.core.turn()
    driven.start(1, LONG, max_tokens=1, warm=warm)
    while driven.core._rows[1].state is not State.LEAVING:
        driven.core.turn()
    sent = list(driven.events[1])
    match ending:
        case "cancel":
            driven.core.cancel(1)
        case "fail":
            driven.core.fail_all(grpc.StatusCode.UNAVAILABLE, "over")
        case "broken step":
            driven.core._batch.step = _broken  # type: ignore[method-assign]
            driven.core.turn()
        case "no store":
            driven.prefix.writes = False
            driven.core.turn()
            driven.prefix.writes = True
    for _ in range(30):
        driven.core.turn()
        for write in driven.prefix.written:
            if write.report is not None:
                driven.core.stored(write.report, len(write.tokens))
    if warm:
        assert (driven.last(1) is None) == (ending == "cancel")
    else:
        assert driven.events[1] == sent
        assert driven.core.counters.cancelled == 0
    assert 1 not in driven.core._rows
    if 2 in driven.core._rows:
        driven.core.cancel(2)
    driven.check_empty()


def _broken() -> Any:
    raise RuntimeError("no memory")


@pytest.mark.parametrize("computed", [STEP.busy, 50, len(LONG)])
def test_a_cancelled_row_is_packed_aside_while_a_stream_goes_on(
    driven: Driven, llama: Any, computed: int
) -> None:
    """It takes part in no step any more, and all that it has computed is stored."""
    driven.start(2, SHORT, max_tokens=200)
    while len(driven.deltas(2)) < 2:
        driven.core.turn()
    driven.start(1, LONG, max_tokens=100)
    while driven.core.counters.prefilled_tokens < len(SHORT) + computed:
        driven.core.turn()
    computed = driven.core.counters.prefilled_tokens - len(SHORT)
    sent = list(driven.events[1])
    driven.core.cancel(1)
    driven.core.cancel(1)
    packs, steps = driven.prefix.packs, len(driven.deltas(2))
    while 1 in driven.core._rows:
        driven.core.turn()
        assert len(driven.core._batch) == 1
        steps += 1
        assert len(driven.deltas(2)) == steps
        packs += 1
        assert driven.prefix.packs <= packs
    assert check(driven, LONG, driven.deltas(1)) == computed
    assert driven.core.counters.prefilled_tokens == len(SHORT) + computed
    assert driven.events[1] == sent
    driven.turn_until_idle()
    assert driven.deltas(2) == alone(llama, SHORT, 200).tokens
    driven.check_empty()


def test_cancelled_rows_take_a_place_until_they_are_packed(driven: Driven) -> None:
    """So what is set aside has a bound, too."""
    for request_id in range(1, 5):
        driven.start(request_id, LONG[request_id:], max_tokens=100)
    while not all(driven.deltas(request_id) for request_id in range(1, 5)):
        driven.core.turn()
    for request_id in range(1, 5):
        driven.core.cancel(request_id)
    driven.start(5, SHORT)
    driven.core.turn()
    assert driven.core.occupancy().queued == 1
    driven.turn_until_idle()
    assert len(driven.deltas(5)) == 3
    assert len(driven.prefix.written) >= 5
    driven.check_empty()


@pytest.mark.parametrize("ending", ["fail", "broken step", "no store", "cannot be packed"])
def test_what_ends_a_row_that_is_set_aside(driven: Driven, ending: str) -> None:
    driven.start(2, SHORT, max_tokens=200)
    driven.core.turn()
    driven.start(1, LONG, max_tokens=100)
    while driven.core.counters.prefilled_tokens < 60:
        driven.core.turn()
    driven.core.cancel(1)
    driven.core.turn()
    assert driven.core._rows[1].aside is not None
    stored = 0
    match ending:
        case "fail":
            driven.core.fail_all(grpc.StatusCode.UNAVAILABLE, "over")
        case "broken step":
            driven.core._batch.step = _broken  # type: ignore[method-assign]
            driven.turn_until_idle()
            stored = 64  # its rows were not in the batch
        case "no store":
            driven.prefix.writes = False
            driven.core.turn()
        case "cannot be packed":
            driven.prefix.fails = {driven.prefix.packs}
            driven.core.turn()
    assert 1 not in driven.core._rows
    assert check(driven, LONG, []) == stored
    assert driven.prefix.given_up == (stored == 0)
    assert driven.events[1] == []
    if 2 in driven.core._rows:
        driven.core.cancel(2)
    driven.check_empty()


def test_two_rows_are_packed_one_after_the_other(driven: Driven) -> None:
    driven.start(1, LONG, max_tokens=60)
    driven.start(2, LONG[::-1], max_tokens=60)
    driven.turn_until_idle()
    for request_id, tokens in ((1, LONG), (2, LONG[::-1])):
        assert check(driven, tokens, driven.deltas(request_id)) >= len(tokens) + 59
    driven.check_empty()


def test_a_long_reply_to_a_short_prompt_is_stored_whole(
    directory: Path, cachestore: Cachestore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # pieces of their real size
    model = save_tiny_model(directory / "model")
    with in_process(model, cachestore.socket, cache_min_quantize_tokens=600) as engine:
        tokens = LONG[:20]
        reply = engine.ask(tokens, max_tokens=900)
        engine.settle()
        assert engine.prefix.status.writes_dropped == 0
        assert cachestore.stats().tokens >= 20 + 899
        again = engine.ask([*tokens, *reply.tokens[:900], 1])
        assert again.done.usage.cached_tokens >= 20 + 899
