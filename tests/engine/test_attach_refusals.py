"""What the store might hand over and must not be attached; and what attaching must not keep."""

import pytest

from cachestore import record
from cachestore.record import RecordError
from engine import attach, pack
from engine.attach import Source
from engine.kv.codec import CodecPolicy
from tests.support.caches import NAMESPACE, TOKENS, layout, packed, path_of, random_layers

OTHER = b"\xff" * 4  # a token that is not in TOKENS


@pytest.fixture
def small() -> tuple[CodecPolicy, bytearray]:
    """A policy, and the bytes of a record of ten rows."""
    geometry = layout((2, 64, 64))
    policy = CodecPolicy.of(geometry, "q8")
    taken = packed(policy.codec, random_layers(geometry, rows=10))
    stored = bytearray(policy.codec.record_overhead_bytes + 10 * policy.codec.row_bytes)
    used = pack.write([taken], 0, 10, path_of(0, 10), memoryview(stored))
    return policy, stored[:used]


def whole(stored: bytes | bytearray | memoryview) -> Source:
    """All rows of that record."""
    return Source(memoryview(stored), 0, 10, path_of(0, 10))


@pytest.mark.parametrize(("first", "rows"), [(0, 11), (10, 1), (5, 6), (0, 0), (-1, 1), (11, -1)])
def test_rows_that_a_record_lacks_are_refused(
    small: tuple[CodecPolicy, bytearray], first: int, rows: int
) -> None:
    policy, stored = small
    with pytest.raises(RecordError):
        attach.plan(policy, [Source(memoryview(stored), first, rows, path_of(0, 11))])


def test_a_foreign_or_broken_record_is_refused(small: tuple[CodecPolicy, bytearray]) -> None:
    policy, stored = small
    good = whole(bytes(stored))
    for view in (memoryview(stored)[:-1], memoryview(bytearray(5000)), memoryview(b"")):
        with pytest.raises(RecordError):
            attach.plan(policy, [good, whole(view)])
    stranger = CodecPolicy.of(layout((2, 64, 64), dtype="bfloat16"), "q8")
    with pytest.raises(RecordError, match="not laid out"):
        attach.plan(stranger, [good])


@pytest.mark.parametrize(
    "path",
    [
        record.paths(bytes(32), TOKENS, [range(10)])[0],
        path_of(1, 10),
        record.paths(NAMESPACE, TOKENS[:36] + OTHER, [range(10)])[0],
        record.paths(NAMESPACE, OTHER + TOKENS[4:], [range(10)])[0],
    ],
    ids=["another namespace", "another place", "another end", "another begin"],
)
def test_rows_of_something_else_are_refused(
    small: tuple[CodecPolicy, bytearray], path: bytes
) -> None:
    """Of the same shape, so that nothing else could tell."""
    policy, stored = small
    with pytest.raises(RecordError, match="other tokens"):
        attach.plan(policy, [whole(stored), Source(memoryview(stored), 0, 10, path)])


def test_tokens_behind_the_match_do_not_matter(small: tuple[CodecPolicy, bytearray]) -> None:
    policy, stored = small
    (path,) = record.paths(NAMESPACE, TOKENS[:28] + bytes(40), [range(7)])
    assert attach.plan(policy, [Source(memoryview(stored), 2, 5, path)]).rows == 5


def test_a_match_of_nothing_is_refused(small: tuple[CodecPolicy, bytearray]) -> None:
    with pytest.raises(RecordError):
        attach.plan(small[0], [])


def test_no_view_outlives_the_copy(small: tuple[CodecPolicy, bytearray]) -> None:
    policy, stored = small
    with memoryview(stored) as view:
        attachment = attach.plan(policy, [whole(view)])
        for block in attachment.blocks:
            block.allocate()
            block.copy()
    stored.clear()  # BufferError while anything is exported
    for block in attachment.blocks:
        block.decode()
    assert [cache.offset for cache in attachment.caches()] == [10, 10]


def test_no_view_outlives_an_attachment_that_is_dropped(
    small: tuple[CodecPolicy, bytearray],
) -> None:
    policy, stored = small
    attachment = attach.plan(policy, [whole(stored)])
    attachment.blocks[0].allocate()
    del attachment
    stored.clear()  # BufferError while anything is exported
    assert not stored


def test_an_extent_that_is_too_short_is_refused() -> None:
    geometry = layout((2, 64, 64))
    codec = CodecPolicy.of(geometry, "none").codec
    taken = packed(codec, random_layers(geometry, rows=4))
    with pytest.raises(RecordError, match="extent"):
        pack.write([taken], 0, 4, path_of(0, 4), memoryview(bytearray(4 * codec.row_bytes)))
