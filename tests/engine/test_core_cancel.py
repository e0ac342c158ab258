"""A request can end early at any moment: one final event or none, and nothing is left of it."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.support.cores import LONG, SHORT, STEP, Driven, alone


def _in_lookup(driven: Driven) -> None:
    driven.submit(1, LONG, max_tokens=5)


def _in_queue(driven: Driven) -> None:
    _in_lookup(driven)
    driven.core.looked_up(1, driven.found(LONG, 40, blocks=2))


def _in_first_copy(driven: Driven) -> None:
    _in_queue(driven)
    driven.core.turn()


def _in_second_copy(driven: Driven) -> None:
    _in_first_copy(driven)
    driven.copied()


def _attached(driven: Driven) -> None:
    _in_second_copy(driven)
    driven.copied()


def _storing(driven: Driven) -> None:
    driven.start(1, LONG, max_tokens=1, warm=True)
    driven.turn_until_idle()


STATES = [
    _in_lookup,
    _in_queue,
    _in_first_copy,
    _in_second_copy,
    _attached,
    _storing,
]


@pytest.mark.parametrize("ending", ["cancel", "fail"])
@pytest.mark.parametrize("state", STATES)
def test_a_request_can_end_in_every_state(
    driven: Driven, llama: Any, state: Callable[[Driven], None], ending: str
) -> None:
    state(driven)
    if ending == "cancel":
        driven.core.cancel(1)
        driven.core.cancel(1)
        assert driven.events[1] == []
        assert driven.core.counters.cancelled == 1
    else:
        driven.core.fail_all(grpc.StatusCode.UNAVAILABLE, "over")
        assert driven.failed(1).code == grpc.StatusCode.UNAVAILABLE
        assert len(driven.events[1]) == 1
    # What was on its way comes too late.
    late = driven.found(LONG, 20)
    driven.core.looked_up(1, late)
    driven.core.copied(1, True)
    driven.core.stored(1, 70)
    sent = list(driven.events[1])
    driven.check_empty()
    driven.start(2, SHORT)
    driven.turn_until_idle()
    assert driven.deltas(2) == alone(llama, SHORT).tokens
    assert driven.events[1] == sent


def turns_to_the_end(llama: Any) -> int:
    driven = Driven(llama)
    driven.start(1, LONG, max_tokens=5)
    turns = 0
    while driven.core.turn():
        turns += 1
    return turns


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
def test_a_request_can_be_cancelled_after_every_step(llama: Any, beside: bool) -> None:
    expected = alone(llama, LONG, 5).tokens
    other = alone(llama, SHORT, 20).tokens
    cancelled = 0
    for turns in range(turns_to_the_end(llama) + 6):
        driven = Driven(llama)
        if beside:
            driven.start(2, SHORT, max_tokens=20)
            driven.core.turn()
        driven.start(1, LONG, max_tokens=5)
        for _ in range(turns):
            driven.core.turn()
        over = driven.last(1) is not None
        sent = len(driven.events[1])
        driven.core.cancel(1)
        cancelled += not over
        assert len(driven.events[1]) == sent
        assert driven.core.counters.cancelled == (not over)
        assert driven.deltas(1) == expected[: len(driven.deltas(1))]
        driven.turn_until_idle()
        assert driven.last(1) is None or over
        if beside:
            assert driven.deltas(2) == other
        driven.check_empty()
        check_stored(driven, expected)
    assert cancelled >= 8


def check_stored(driven: Driven, reply: list[int]) -> None:
    """Of request 1 each row is written once, in order, under the tokens that it stands for."""
    path = (*LONG, *reply)
    position = 0
    for write in driven.prefix.written:
        if write.tokens[:3] == tuple(LONG[:3]):
            assert write.first == position
            position = len(write.tokens)
            assert write.tokens == path[:position]


def test_a_cancelled_prefill_keeps_what_it_computed(driven: Driven) -> None:
    driven.start(1, LONG)
    driven.core.turn()
    driven.core.turn()
    driven.core.cancel(1)
    driven.turn_until_idle()
    (write,) = driven.prefix.written
    assert write.tokens == tuple(LONG[: 2 * STEP.idle])
