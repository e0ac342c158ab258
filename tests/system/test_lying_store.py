"""A store that lies: the reply is that of a cold run, and nothing of the lie is left in it."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from cachestore.v1 import cachestore_pb2 as pb
from engine import attach
from tests.support.liars import Deceived, altered, deceived
from tests.support.pairs import prompt
from tests.support.stores import packed

RECORD_ROWS = 256
PROMPT, OTHER = prompt(1, 600), prompt(2, 600)
# One row of difference, before the second record and inside of it.
EARLY, LATE = list(PROMPT), list(PROMPT)
EARLY[100] ^= 1
LATE[300] ^= 1


@pytest.fixture(scope="module")
def stage() -> Iterator[Deceived]:
    with deceived(PROMPT, [OTHER, EARLY, LATE]) as made:
        yield made


def change_of(
    column: str, span: int, value: int | Callable[[int], int]
) -> Callable[[pb.LookupResponse], None]:
    """One field of one span becomes `value`, or that function of it."""

    def change(answer: pb.LookupResponse) -> None:
        fields = getattr(answer.spans, column)
        fields[span] = value(fields[span]) if callable(value) else value

    return change


def reorder(order: list[int]) -> Callable[[pb.LookupResponse], None]:
    """The spans that stood at these places."""

    def change(answer: pb.LookupResponse) -> None:
        for column in pb.Spans.DESCRIPTOR.fields:
            fields = getattr(answer.spans, column.name)
            fields[:] = [fields[place] for place in order]

    return change


def shift_rows(answer: pb.LookupResponse) -> None:
    """As many rows, but others of the same records."""
    answer.spans.rows[0] -= 1
    answer.spans.first_rows[1] -= 1 if answer.spans.first_rows[1] else 0
    answer.spans.rows[1] += 1


@pytest.mark.parametrize(
    "change",
    [
        change_of("slab_ids", 0, 0),
        change_of("slab_ids", 0, 99),
        change_of("slab_ids", 0, 2**64 - 1),
        change_of("offsets", 0, 2**40),
        change_of("offsets", 0, 2**64 - 256),
        change_of("lengths", 0, 2**63),
        change_of("offsets", 1, lambda offset: offset + 256),
        change_of("record_bytes", 1, lambda size: size - 1),
        change_of("record_bytes", 1, 2**64 - 1),
        change_of("first_rows", 1, 1),
        change_of("first_rows", 1, 2**32 - 1),
        change_of("rows", 1, 2**32 - 1),
        lambda a: setattr(a, "rows", a.rows - 1),
        lambda a: setattr(a, "rows", a.rows + 1),
        lambda a: setattr(a, "kind", 17),
        lambda a: setattr(a, "lease_seconds", float("nan")),
        lambda a: setattr(a, "lease_id", 0),
        lambda a: a.spans.rows.append(1),
        reorder([2, 1, 0]),
        reorder([0, 1, 2, 0]),
        shift_rows,
    ],
)
def test_a_malformed_answer(
    assert_miss: Callable[..., None], change: Callable[[pb.LookupResponse], Any]
) -> None:
    assert_miss("Lookup", altered(change))


def swap_rows(answer: pb.LookupResponse, wrong: pb.LookupResponse) -> None:
    """The lease stays, and is valid: only the rows are others."""
    assert answer.rows == wrong.rows == len(PROMPT) - 1
    answer.spans.CopyFrom(wrong.spans)


@pytest.mark.parametrize("answer", [b"\xff" * 40, b"\x0a\xff", bytes(1000), b""])
def test_an_answer_that_is_noise(assert_miss: Callable[..., None], answer: bytes) -> None:
    assert_miss("Lookup", lambda *_: answer)


@pytest.mark.parametrize("tokens", [OTHER, EARLY, LATE], ids=["all", "before", "inside"])
def test_rows_of_other_tokens(
    stage: Deceived, assert_miss: Callable[..., None], tokens: list[int]
) -> None:
    wrong = stage.lookup(stage.namespace, tokens)
    assert_miss("Lookup", altered(lambda answer: swap_rows(answer, wrong)))


def test_rows_of_another_namespace(stage: Deceived, assert_miss: Callable[..., None]) -> None:
    wrong = stage.lookup(stage.other_namespace, PROMPT)
    assert_miss("Lookup", altered(lambda answer: swap_rows(answer, wrong)))


def test_rows_of_another_place(stage: Deceived, assert_miss: Callable[..., None]) -> None:
    """The second record of the prompt, twice."""

    def change(answer: pb.LookupResponse) -> None:
        assert list(answer.spans.rows) == [RECORD_ROWS, RECORD_ROWS, 87]
        reorder([1, 1, 2])(answer)

    assert_miss("Lookup", altered(change))


@pytest.mark.parametrize(
    "damage",
    [
        (0, b"\xc1"),  # no msgpack
        (0, b"\xdf\xff\xff\xff\xff"),  # a map of 4 billion fields
        (30, b"\x01"),
        (39, b"\x01"),  # another version
    ],
)
def test_a_damaged_record(
    stage: Deceived, assert_miss: Callable[..., None], damage: tuple[int, bytes]
) -> None:
    where, data = damage
    lease = stage.client.lookup(stage.namespace, packed(PROMPT), len(PROMPT) - 1)
    span = lease.spans[1]
    slab = stage.client._slabs.map(span.slab_id)
    place = slice(span.offset + where, span.offset + where + len(data))
    before = slab[place]
    assert before != data
    slab[place] = data
    try:
        assert_miss("Lookup", lambda _, truth: truth)
    finally:
        slab[place] = before
        stage.client.release([lease.id])


@pytest.mark.parametrize("answer", [pb.RenewResponse(valid=[False]), pb.RenewResponse()])
def test_a_lease_that_was_none(assert_miss: Callable[..., None], answer: pb.RenewResponse) -> None:
    assert_miss("Renew", lambda *_: answer.SerializeToString())


@pytest.mark.parametrize("calls", [("Lookup", "Renew"), ("Renew",)])
def test_answers_that_come_too_late(
    stage: Deceived, assert_miss: Callable[..., None], calls: tuple[str, ...]
) -> None:
    over = threading.Event()

    def late(_: bytes, truth: bytes) -> bytes:
        over.wait(60)
        return truth

    stage.liar.lies.update(dict.fromkeys(calls, late))
    try:
        assert_miss(calls[0], late)
    finally:
        over.set()


LAYER_STEPS = [
    (step, layer) for step in ("allocate", "copy", "decode", "take_caches") for layer in (0, 1)
]


@pytest.mark.parametrize(("step", "layer"), LAYER_STEPS)
def test_a_load_that_fails_at_any_layer(
    stage: Deceived,
    assert_miss: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    layer: int,
) -> None:
    """Nothing of it is left in the request: all of its rows are computed."""
    whole = getattr(attach.Block, step)

    def fail(block: attach.Block) -> Any:
        if layer in block._layers:
            raise MemoryError(f"layer {layer}")
        return whole(block)

    monkeypatch.setattr(attach, "plan", partial(attach.plan, block_bytes=1))
    monkeypatch.setattr(attach.Block, step, fail)
    assert_miss("Lookup", lambda _, truth: truth)
    monkeypatch.undo()
