"""A store that lies to a writer: the reply is right, nothing wrong is stored, and nothing stays
reserved for somebody who will never write there."""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cachestore.v1 import cachestore_pb2 as pb
from engine import link
from tests.support.engines import assert_same
from tests.support.liars import REPLY_TOKENS, Deceived, Lie, deceived
from tests.support.models import qwen3_next_config
from tests.support.pairs import OTHER_CUTS, prompt
from tests.support.waiting import until

TOKENS = 300
NOISE = b"\xff" * 40
seeds = itertools.count(1)

Change = Callable[[Any], object]


@pytest.fixture(scope="module")
def stage() -> Iterator[Deceived]:
    """Of a hybrid: each prompt is written as rows and a checkpoint."""
    with deceived(prompt(0, TOKENS), [], qwen3_next_config()) as made:
        yield made


def assert_write_is_lost(
    stage: Deceived, monkeypatch: pytest.MonkeyPatch, call: str, lie: Lie, committed: bool = False
) -> None:
    """The store tells the lie about a new prompt. `committed`: it has its rows all the same."""
    monkeypatch.setattr(link, "PAUSE_SECONDS", 0.0)
    engine, tokens = stage.engine, prompt(next(seeds), TOKENS)
    expected = engine.alone(tokens, REPLY_TOKENS)
    dropped = engine.prefix.status.writes_dropped
    stage.liar.told = 0
    stage.liar.lies[call] = lie
    reply = engine.ask(tokens, REPLY_TOKENS)
    engine.settle()
    stage.liar.lies.clear()
    assert_same(reply, expected, OTHER_CUTS)
    assert stage.liar.told == 1
    assert engine.prefix.status.writes_dropped == dropped + 1

    def nothing_reserved() -> bool:
        stats = stage.client.stats()
        return stats.reservations == stats.bytes_reserved == stats.bytes_quarantined == 0

    # Long before a reservation lapses: the session is given up in which it was made.
    until(nothing_reserved, "the reservation to end")
    until(lambda: engine.prefix.status.connected, "a session")
    for cached in (TOKENS - 1 if committed else 0, TOKENS - 1):
        again = engine.ask(tokens, REPLY_TOKENS)
        engine.settle()
        assert again.done.usage.cached_tokens == cached
        assert_same(again, expected, OTHER_CUTS)


def change_of_extent(**fields: int) -> Change:
    return lambda answer: answer.pieces[0].extent.MergeFrom(pb.Extent(**fields))


def change_of_checkpoint(**fields: int) -> Change:
    return lambda answer: answer.checkpoints[0].extent.MergeFrom(pb.Extent(**fields))


# Of each kind one: tests/cachestore/test_reply.py has every contradiction.
@pytest.mark.parametrize(
    "change",
    [
        lambda answer: setattr(answer, "reservation_id", 0),
        lambda answer: setattr(answer, "have", 2**32 - 1),
        lambda answer: setattr(answer.pieces[0], "rows", 2**32 - 1),
        change_of_extent(slab_id=99),
        change_of_extent(offset=2**40),
        change_of_extent(length=2**63),
        change_of_checkpoint(slab_id=99),
        change_of_checkpoint(offset=2**40),
        lambda answer: setattr(answer.checkpoints[0], "position", 2),
    ],
)
def test_room_that_cannot_be(
    stage: Deceived, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    def lie(_: bytes, truth: bytes) -> bytes:
        answer = pb.ReserveResponse.FromString(truth)
        change(answer)
        return answer.SerializeToString()

    assert_write_is_lost(stage, monkeypatch, "Reserve", lie)


@pytest.mark.parametrize("answer", [NOISE, b""])
def test_room_that_is_noise(
    stage: Deceived, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    assert_write_is_lost(stage, monkeypatch, "Reserve", lambda *_: answer)


def test_a_commit_of_which_nothing_is_known(
    stage: Deceived, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_write_is_lost(stage, monkeypatch, "Commit", lambda *_: NOISE, committed=True)


@pytest.mark.parametrize("call", ["Reserve", "Commit"])
def test_an_answer_that_comes_too_late(
    stage: Deceived, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    over = threading.Event()

    def late(_: bytes, truth: bytes) -> bytes:
        over.wait(60)
        return truth

    try:
        assert_write_is_lost(stage, monkeypatch, call, late, committed=call == "Commit")
    finally:
        over.set()
