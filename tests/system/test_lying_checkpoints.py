"""A store that lies about a checkpoint: the hit is a miss, rows and all, and the reply is right."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cachestore import record
from cachestore.record import Schema
from cachestore.v1 import cachestore_pb2 as pb
from engine.config import CHECKPOINT_STRIDE_MIN
from tests.support.liars import Deceived, altered, deceived
from tests.support.models import qwen3_next_config
from tests.support.pairs import prompt
from tests.support.stores import packed

PROMPT, OTHER = prompt(1, 600), prompt(2, 600)
# Where the prompt's last checkpoint is.
POSITION = len(PROMPT) - 1
EARLIER = 2 * CHECKPOINT_STRIDE_MIN
# One row of difference, long before the checkpoint.
EARLY = [PROMPT[0] ^ 1, *PROMPT[1:]]

Change = Callable[[pb.LookupResponse], Any]


@pytest.fixture(scope="module")
def stage() -> Iterator[Deceived]:
    stride = CHECKPOINT_STRIDE_MIN
    with deceived(PROMPT, [OTHER, EARLY], qwen3_next_config(), checkpoint_stride=stride) as made:
        yield made


def position(value: int) -> Change:
    return lambda answer: setattr(answer.checkpoint, "position", value)


def record_bytes(change: Callable[[int], int]) -> Change:
    def lie(answer: pb.LookupResponse) -> None:
        answer.checkpoint.record_bytes = change(answer.checkpoint.record_bytes)

    return lie


def extent(**fields: int) -> Change:
    return lambda answer: answer.checkpoint.extent.MergeFrom(pb.Extent(**fields))


def beyond_the_match(answer: pb.LookupResponse) -> None:
    """One row more than was asked for, and the checkpoint behind it."""
    answer.rows = answer.checkpoint.position = POSITION + 1
    answer.spans.rows[-1] += 1


@pytest.mark.parametrize(
    "change",
    [
        position(0),
        position(POSITION - 1),
        position(POSITION + 1),
        position(2**32 - 1),
        beyond_the_match,
        lambda answer: answer.ClearField("checkpoint"),
        record_bytes(lambda _: 0),
        record_bytes(lambda size: size - 1),
        record_bytes(lambda _: 2**64 - 1),
        extent(slab_id=99),
        extent(offset=2**40),
        extent(length=2**63),
        extent(length=256),
    ],
)
def test_a_malformed_answer(assert_miss: Callable[..., None], change: Change) -> None:
    assert_miss("Lookup", altered(change))


def checkpoint_of(wrong: pb.LookupResponse) -> Change:
    """Another one's bytes are said to be those of this position."""

    def change(answer: pb.LookupResponse) -> None:
        at = answer.checkpoint.position
        answer.checkpoint.CopyFrom(wrong.checkpoint)
        answer.checkpoint.position = at

    return change


@pytest.mark.parametrize(
    "tokens", [OTHER, EARLY, PROMPT[: EARLIER + 1]], ids=["all", "the first", "fewer"]
)
def test_the_checkpoint_of_other_tokens(
    stage: Deceived, assert_miss: Callable[..., None], tokens: list[int]
) -> None:
    wrong = stage.lookup(stage.namespace, tokens)
    assert wrong.checkpoint.position == len(tokens) - 1
    assert_miss("Lookup", altered(checkpoint_of(wrong)))


def test_the_checkpoint_of_another_namespace(
    stage: Deceived, assert_miss: Callable[..., None]
) -> None:
    wrong = stage.lookup(stage.other_namespace, PROMPT)
    assert wrong.checkpoint.position == POSITION
    assert_miss("Lookup", altered(checkpoint_of(wrong)))


def test_fewer_rows_than_the_checkpoint_is_of(assert_miss: Callable[..., None]) -> None:
    def change(answer: pb.LookupResponse) -> None:
        answer.rows = answer.checkpoint.position = POSITION - 10
        answer.spans.rows[-1] -= 10

    assert_miss("Lookup", altered(change))


def test_rows_in_place_of_a_checkpoint(assert_miss: Callable[..., None]) -> None:
    def change(answer: pb.LookupResponse) -> None:
        spans = answer.spans
        answer.checkpoint.extent.CopyFrom(
            pb.Extent(
                slab_id=spans.slab_ids[-1],
                offset=spans.offsets[-1],
                length=spans.lengths[-1],
                generation=spans.generations[-1],
            )
        )
        answer.checkpoint.record_bytes = spans.record_bytes[-1]

    assert_miss("Lookup", altered(change))


def without_a_part(schema: Schema) -> Schema:
    return replace(schema, parts=schema.parts[:-1])


def without_a_layer(schema: Schema) -> Schema:
    parts = [replace(part, layers=part.layers[:-1]) for part in schema.parts]
    return replace(schema, parts=tuple(parts))


def of_half_the_width(schema: Schema) -> Schema:
    *parts, last = schema.parts
    arrays = tuple(replace(array, width=array.width // 2) for array in last.arrays)
    return replace(schema, parts=(*parts, replace(last, arrays=arrays)))


@pytest.mark.parametrize("wrong", [without_a_part, without_a_layer, of_half_the_width])
def test_a_checkpoint_that_lacks_something(
    stage: Deceived, assert_miss: Callable[..., None], wrong: Callable[[Schema], Schema]
) -> None:
    """It stands in the place of the right one, and says that it is of the right tokens."""
    tokens = packed(PROMPT)
    lease = stage.client.lookup(stage.namespace, tokens, POSITION, checkpointed=True)
    assert lease.checkpoint is not None
    held = stage.client._view(lease.checkpoint.extent)
    right = bytes(held)
    (path,) = record.paths(stage.namespace, tokens, [range(POSITION - 1, POSITION)])
    lacking = record.plan(wrong(record.read(held).schema), 1)
    record.write_header(lacking, path, held)
    assert record.read(held).belongs(held, path)
    try:
        assert_miss("Lookup", altered(record_bytes(lambda _: lacking.record_bytes)))
    finally:
        held[:] = right
        stage.client.release([lease.id])
