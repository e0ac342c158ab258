"""What fails fails alone where it can, and is told to its callers; the next request works."""

from collections.abc import Callable
from typing import Any

import grpc
import mlx.core as mx
import pytest

from engine import core as core_module
from engine import writeback
from engine.batch import Batch, Token
from engine.core import BatchBroken
from engine.request import Done, FinishReason, Sampling
from tests.support.cores import LONG, SHORT, Driven, alone


class Switched:
    """A model whose forward raises while a test says so."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.failing: Callable[[], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.failing is not None:
            self.failing()
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _lose_the_device() -> None:
    raise RuntimeError("the device is lost")


def break_next(driven: Driven, error: BaseException | None = None) -> None:
    """The next step of the batch raises after it has begun."""
    batch = driven.core._batch
    step = batch.step

    def broken() -> Any:
        step()
        raise error or RuntimeError("no memory")

    batch.step = broken  # type: ignore[method-assign]


def test_a_step_that_raises_fails_its_rows_and_the_next_request_works(
    driven: Driven, llama: Any
) -> None:
    driven.start(1, SHORT, max_tokens=50)
    driven.core.turn()
    driven.core.turn()
    driven.start(2, LONG)
    driven.submit(3, SHORT)  # in lookup
    driven.submit(4, LONG)
    driven.core.looked_up(4, driven.found(LONG, 60))
    driven.core.turn()  # 1 decodes, 2 prefills, 4 waits for its copy
    break_next(driven)
    driven.core.turn()
    for request_id in (1, 2):
        assert driven.failed(request_id).code == grpc.StatusCode.INTERNAL
        assert "no memory" in driven.failed(request_id).message
    assert driven.last(3) is None
    assert driven.last(4) is None
    driven.core.looked_up(3, driven.miss())
    driven.copied()
    driven.start(5, LONG)
    driven.turn_until_idle()
    assert driven.deltas(3) == alone(llama, SHORT).tokens
    assert driven.deltas(4) == alone(llama, LONG).tokens
    assert driven.deltas(5) == alone(llama, LONG).tokens
    assert driven.core.counters.failed == 2
    driven.check_empty()


def test_a_model_that_raises_in_the_middle_of_a_step(llama: Any) -> None:
    model = Switched(llama)
    driven = Driven(model)
    driven.start(1, SHORT, max_tokens=50)
    driven.core.turn()
    driven.start(2, LONG)
    driven.core.turn()
    model.failing = _lose_the_device
    driven.core.turn()
    model.failing = None
    for request_id in (1, 2):
        assert "the device is lost" in driven.failed(request_id).message
    driven.start(3, LONG)
    driven.turn_until_idle()
    assert driven.deltas(3) == alone(llama, LONG).tokens
    driven.check_empty()


def test_rows_that_left_in_a_failing_step_are_not_taken_for_those_of_the_next_batch(
    driven: Driven, llama: Any
) -> None:
    driven.start(1, SHORT, max_tokens=1)
    driven.start(2, SHORT[::-1], max_tokens=9)

    def fail(request_id: int, _: Token) -> None:
        if request_id == 2:
            raise RuntimeError("in the middle of the tokens of a step")

    driven.core.observe = fail
    while driven.last(2) is None:
        driven.core.turn()
    assert isinstance(driven.last(1), Done)
    assert driven.failed(2)
    driven.core.observe = None
    for request_id in (3, 4):
        driven.start(request_id, LONG[request_id:])
    driven.turn_until_idle()
    for request_id in (3, 4):
        assert driven.deltas(request_id) == alone(llama, LONG[request_id:]).tokens
    driven.check_empty()


def test_a_failed_step_leaves_no_reference_to_the_old_caches(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps log records, and with them the frames of the exception.
    monkeypatch.setattr(core_module.log, "exception", lambda *_: None)
    model = Switched(llama)
    driven = Driven(model)
    driven.start(0, SHORT)
    driven.turn_until_idle()
    mx.clear_cache()
    before = mx.get_active_memory()
    driven.start(1, LONG * 10, max_tokens=1)
    for _ in range(10):
        driven.core.turn()
    assert mx.get_active_memory() > before + 250_000
    model.failing = _lose_the_device
    driven.core.turn()
    assert driven.failed(1)
    driven.check_empty()
    assert mx.get_active_memory() < before + 100_000


def test_two_failing_steps_in_a_row_are_the_end(driven: Driven) -> None:
    driven.start(1, SHORT)
    break_next(driven)
    driven.core.turn()
    driven.start(2, SHORT)
    driven.submit(3, SHORT)
    break_next(driven)
    with pytest.raises(BatchBroken, match="no memory"):
        driven.core.turn()
    assert driven.failed(2).code == grpc.StatusCode.INTERNAL
    assert driven.last(3) is None  # for the worker to end
    driven.core.fail_all(grpc.StatusCode.INTERNAL, "the worker died")
    driven.core.close()
    assert driven.failed(3).message == "the worker died"


def test_a_good_step_between_two_failing_ones_is_a_new_beginning(driven: Driven) -> None:
    for request_id in range(4):
        driven.start(request_id, SHORT)
        driven.core.turn()
        break_next(driven)
        driven.core.turn()
        assert driven.failed(request_id)
    driven.start(9, SHORT)
    driven.turn_until_idle()
    assert driven.done(9)


def test_a_row_whose_sampler_fails_fails_alone(driven: Driven, llama: Any) -> None:
    driven.start(1, LONG, max_tokens=8)
    driven.start(2, SHORT, sampling=Sampling(1.0, top_k=10_000))  # as no checked request is
    driven.turn_until_idle()
    assert driven.failed(2).code == grpc.StatusCode.INTERNAL
    assert "top_k" in driven.failed(2).message
    assert driven.deltas(2) == []
    assert driven.deltas(1) == alone(llama, LONG, 8).tokens
    driven.check_empty()


def test_a_row_whose_text_fails_fails_alone(driven: Driven, llama: Any) -> None:
    expected = alone(llama, SHORT, 8).tokens
    driven.start(1, LONG, max_tokens=8)
    driven.start(2, SHORT, max_tokens=8)
    push = driven.core._rows[2].output.push

    def fail(*arguments: Any, **named: Any) -> Any:
        if len(driven.core._rows[2].output.tokens) == 3:
            raise KeyError("no such token")
        return push(*arguments, **named)

    driven.core._rows[2].output.push = fail  # type: ignore[method-assign]
    driven.turn_until_idle()
    assert driven.deltas(2) == expected[:3]
    assert "no such token" in driven.failed(2).message
    assert driven.deltas(1) == alone(llama, LONG, 8).tokens
    driven.check_empty()


def test_a_request_that_cannot_begin_is_told_so(driven: Driven, llama: Any) -> None:
    make = driven.core.new_detokenizer
    driven.core.new_detokenizer = lambda: (_ for _ in ()).throw(TypeError("no tokenizer"))
    driven.submit(1, SHORT)
    assert "no tokenizer" in driven.failed(1).message
    driven.core.new_detokenizer = make
    driven.check_empty()
    driven.start(2, SHORT)
    driven.turn_until_idle()
    assert driven.deltas(2) == alone(llama, SHORT).tokens


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_rows_that_cannot_be_taken_out_are_not_stored_and_the_reply_is_whole(
    driven: Driven, llama: Any, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("cannot be sliced")

    monkeypatch.setattr(Batch, "rows", fail)
    driven.start(1, LONG, max_tokens=max_tokens)
    driven.start(2, SHORT, max_tokens=1, warm=True)
    driven.turn_until_idle()
    assert driven.deltas(1) == alone(llama, LONG, max_tokens).tokens
    assert isinstance(driven.last(1), Done)
    assert driven.done(2).stored_tokens == 0
    assert driven.prefix.written == []
    driven.start(3, LONG)
    driven.core.turn()
    driven.core.cancel(3)
    driven.check_empty()


@pytest.mark.parametrize("fails", [0, 1, 3])
@pytest.mark.parametrize("warm", [False, True])
def test_after_encoding_failed_nothing_more_is_stored(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, fails: int, warm: bool
) -> None:
    # Later rows would extend rows that the store never gets.
    monkeypatch.setattr(writeback, "PIECE_ROWS", 20)
    driven.prefix.fails = {fails}
    driven.start(1, LONG, max_tokens=30, warm=warm)
    driven.turn_until_idle()
    assert driven.prefix.written == []
    assert driven.prefix.given_up == 1
    assert driven.done(1).stored_tokens == 0
    driven.check_empty()


@pytest.mark.parametrize("how", ["to the end", "cancelled", "warm"])
def test_rows_that_no_store_takes_are_counted_once(driven: Driven, how: str) -> None:
    driven.prefix.writes = False
    driven.start(1, LONG, max_tokens=6, warm=how == "warm")
    if how == "cancelled":
        driven.core.turn()
        driven.core.cancel(1)
    driven.turn_until_idle()
    assert driven.prefix.given_up == 1
    driven.prefix.writes = True
    driven.start(2, LONG, max_tokens=6)
    driven.turn_until_idle()
    assert driven.prefix.given_up == 1


def test_a_store_that_comes_during_a_decode_gets_all_rows(driven: Driven) -> None:
    driven.prefix.writes = False
    driven.start(1, LONG, max_tokens=6)
    for _ in range(7):
        driven.core.turn()
    assert driven.deltas(1)
    driven.prefix.writes = True
    driven.turn_until_idle()
    prompt, reply = driven.prefix.written
    assert (prompt.first, len(prompt.tokens), reply.first) == (0, 70, 70)


# --- closing -----------------------------------------------------------------------------


def test_closing_an_empty_core(llama: Any) -> None:
    Driven(llama).core.close()
    driven = Driven(llama)
    driven.start(1, SHORT)
    driven.turn_until_idle()
    driven.core.close()
    assert len(driven.core._batch) == 0


def test_closing_in_the_middle_gives_memory_back(llama: Any) -> None:
    driven = Driven(llama)
    driven.start(0, SHORT)
    driven.turn_until_idle()
    mx.clear_cache()
    before = mx.get_active_memory()
    for request_id in (1, 2, 3):
        driven.start(request_id, LONG * 5, max_tokens=50)
    for _ in range(30):
        driven.core.turn()
    driven.core.fail_all(grpc.StatusCode.UNAVAILABLE, "the engine is stopping")
    driven.core.close()
    assert all(driven.failed(request_id) for request_id in (1, 2, 3))
    assert len(driven.core) == 0
    assert mx.get_active_memory() < before + 100_000


def test_stop_tokens_and_counters(driven: Driven, llama: Any) -> None:
    expected = alone(llama, LONG, 6).tokens
    stop = expected[3]
    driven.start(1, LONG, max_tokens=6, stop_token_ids=frozenset([stop]))
    driven.turn_until_idle()
    cut = expected.index(stop)
    assert driven.deltas(1) == expected[:cut]
    done = driven.done(1)
    assert done.reason is FinishReason.STOP
    assert done.usage.completion_tokens == cut + 1
    counters = driven.core.counters
    assert (counters.finished, counters.failed, counters.cancelled) == (1, 0, 0)
    assert (counters.prompt_tokens, counters.prefilled_tokens) == (70, 70)
    assert counters.completion_tokens == cut + 1
    assert core_module.STEP_FAILURES_MAX == 2


def test_what_a_reply_had_still_to_store_at_the_end_is_counted(driven: Driven) -> None:
    driven.start(1, [n % 256 for n in range(600)], max_tokens=1)
    while driven.last(1) is None:
        driven.core.turn()
    assert len(driven.core) == 1  # a part of its rows is not packed yet
    driven.core.fail_all(grpc.StatusCode.UNAVAILABLE, "the engine is stopping")
    assert driven.done(1).reason is FinishReason.LENGTH
    assert driven.prefix.given_up == 1
    driven.check_empty()
