import pytest

from cachestore.extent import Extent
from cachestore.node import Record, Span
from cachestore.tree import MatchKind, Tree
from tests.support.stores import NAMESPACE, packed
from tests.support.whole import whole

RECORD_TOKENS = 4


def span(record_id: int, rows: int, first_row: int = 0) -> Span:
    extent = Extent(slab_id=1, offset=256 * record_id, length=256, generation=record_id)
    return Span(record_id, extent, record_bytes=200, first_row=first_row, rows=rows)


def store(tree: Tree, ids: list[int]) -> list[Record]:
    """Insert what is missing of a sequence, in records of four rows, and mark its end."""
    walk = tree.walk(packed(ids))
    end, offset, added = walk.end, walk.offset, []
    for start in range(walk.depth, len(ids), RECORD_TOKENS):
        run = ids[start : start + RECORD_TOKENS]
        record_id = 1 + max((record.span.record_id for record in tree), default=0)
        end = tree.insert(end, offset, packed(run), span(record_id, len(run)))
        offset = end.rows
        added.append(end)
    tree.mark(end, offset)
    whole(tree.checks())
    return added


def tree_of(*sequences: list[int]) -> Tree:
    tree = Tree(NAMESPACE)
    for sequence in sequences:
        store(tree, sequence)
    return tree


def rows_of(tree: Tree, ids: list[int]) -> list[tuple[int, int]]:
    """The record and the row of it that holds each matched token."""
    walk = tree.walk(packed(ids))
    return [
        (span.record_id, row)
        for span in walk.spans(walk.depth)
        for row in range(span.first_row, span.first_row + span.rows)
    ]


@pytest.mark.parametrize(
    ("asked", "kind", "depth"),
    [
        ([1, 2, 3, 4, 5, 6], MatchKind.EXACT, 6),
        ([1, 2, 3], MatchKind.EXACT, 3),
        ([1, 2, 3, 4, 5], MatchKind.SUPERSEQUENCE, 5),
        ([1, 2], MatchKind.SUPERSEQUENCE, 2),
        ([1, 2, 3, 4], MatchKind.SUPERSEQUENCE, 4),
        ([1, 2, 3, 4, 5, 6, 7], MatchKind.PREFIX, 6),
        ([1, 2, 3, 9], MatchKind.PREFIX, 3),
        ([1, 2, 9], MatchKind.LCP, 2),
        ([1, 2, 3, 4, 9], MatchKind.LCP, 4),
        ([9, 1, 2, 3], MatchKind.MISS, 0),
    ],
)
def test_the_kind_of_match_is_the_first_that_applies(
    asked: list[int], kind: MatchKind, depth: int
) -> None:
    walk = tree_of([1, 2, 3, 4, 5, 6], [1, 2, 3]).walk(packed(asked))
    assert (walk.kind, walk.depth) == (kind, depth)


def test_an_empty_tree_is_a_miss() -> None:
    walk = Tree(NAMESPACE).walk(packed([1]))
    assert (walk.kind, walk.depth, walk.path) == (MatchKind.MISS, 0, ())
    assert walk.spans(0) == ()


@pytest.mark.parametrize("fork", range(1, 12))
def test_sequences_that_part_at_any_offset_share_what_is_common(fork: int) -> None:
    first = list(range(12))
    second = first[:fork] + list(range(100, 105))
    tree = tree_of(first)
    before = rows_of(tree, first)
    store(tree, second)
    assert rows_of(tree, first) == before
    assert rows_of(tree, second)[:fork] == before[:fork]
    assert tree.walk(packed(first)).kind == tree.walk(packed(second)).kind == MatchKind.EXACT
    assert tree.tokens == 12 + 5
    assert tree.sequences == 2


def test_a_walk_through_a_fork_has_one_span_for_each_record() -> None:
    tree = tree_of([1, 2, 3, 4], [1, 2, 8, 9])
    forked, straight = tree.walk(packed([1, 2, 8, 9])), tree.walk(packed([1, 2, 3, 4]))
    assert forked.spans(4) == (span(1, rows=2), span(2, rows=2))
    assert straight.spans(4) == (span(1, rows=4),)


@pytest.mark.parametrize("rows", range(7))
def test_spans_serve_as_many_rows_as_wanted(rows: int) -> None:
    walk = tree_of([1, 2, 3, 4, 5, 6]).walk(packed([1, 2, 3, 4, 5, 6]))
    spans = walk.spans(rows)
    assert sum(span.rows for span in spans) == rows
    assert all(span.rows >= 1 for span in spans)


def test_matching_compares_tokens_and_not_bytes() -> None:
    # The bytes of both agree up to the middle of the second token.
    stored, asked = [0x01010101, 0x02010101], [0x01010101, 0x03010101]
    walk = tree_of(stored).walk(packed(asked))
    assert (walk.kind, walk.depth) == (MatchKind.LCP, 1)
    # The bytes of the stored sequence occur in the request, but not where a token begins.
    assert tree_of([0x01010101]).walk(b"\0\1\1\1\1\1\1\1").depth == 0


def test_a_walk_changes_nothing() -> None:
    tree = tree_of([1, 2, 3, 4, 5], [1, 2, 9])
    before = [(r.run, r.span, r.fork, sorted(r.marks), len(r.children)) for r in tree]
    for asked in ([1], [1, 2, 3], [1, 2, 3, 8], [1, 2, 9, 9], [7]):
        tree.walk(packed(asked))
    assert before == [(r.run, r.span, r.fork, sorted(r.marks), len(r.children)) for r in tree]


def test_a_sequence_that_ends_inside_a_run_is_marked_there_once() -> None:
    tree = tree_of([1, 2, 3, 4])
    assert store(tree, [1, 2]) == []
    assert store(tree, [1, 2]) == []
    assert (tree.sequences, tree.records, tree.tokens) == (2, 1, 4)
    assert tree.walk(packed([1, 2])).kind == MatchKind.EXACT
    assert tree.walk(packed([1, 2, 9])).kind == MatchKind.PREFIX


def test_removing_the_end_of_a_sequence_leaves_a_shorter_one() -> None:
    tree = Tree(NAMESPACE)
    upper, lower = store(tree, [1, 2, 3, 4, 5, 6])
    assert not upper.idle
    assert tree.remove(lower) is upper
    assert upper.idle
    whole(tree.checks())
    # Nothing longer is held, and no sequence ends there.
    assert tree.walk(packed([1, 2, 3, 4])).kind == MatchKind.LCP
    assert (tree.tokens, tree.sequences, tree.records) == (4, 0, 1)
    assert tree.remove(upper) is None
    assert (tree.tokens, tree.sequences, tree.records) == (0, 0, 0)
    assert tree.walk(packed([1, 2])).kind == MatchKind.MISS


def test_what_forks_off_earlier_makes_no_supersequence() -> None:
    tree = Tree(NAMESPACE)
    *_, lower = store(tree, [1, 2, 3, 4, 5, 6])
    store(tree, [1, 2, 9])
    assert tree.walk(packed([1, 2, 3, 4])).kind == MatchKind.SUPERSEQUENCE
    tree.remove(lower)
    assert tree.walk(packed([1, 2, 3, 4])).kind == MatchKind.LCP


def test_a_removed_end_can_come_back() -> None:
    tree = Tree(NAMESPACE)
    *_, lower = store(tree, [1, 2, 3, 4, 5, 6])
    tree.remove(lower)
    assert [record.run for record in store(tree, [1, 2, 3, 4, 5, 6])] == [packed([5, 6])]
    assert tree.walk(packed([1, 2, 3, 4, 5, 6])).kind == MatchKind.EXACT


def test_a_record_that_carries_others_or_a_pin_is_not_removed() -> None:
    tree = Tree(NAMESPACE)
    (record,) = store(tree, [1, 2, 3])
    store(tree, [1, 7])
    with pytest.raises(AssertionError):
        tree.remove(record)
    (pinned,) = store(tree, [9])
    pinned.pins = 1
    with pytest.raises(AssertionError):
        tree.remove(pinned)


def test_a_second_way_to_the_same_tokens_is_not_inserted() -> None:
    tree = Tree(NAMESPACE)
    (record,) = store(tree, [1, 2, 3])
    with pytest.raises(AssertionError):
        tree.insert(record, 2, packed([3]), span(7, rows=1))
    store(tree, [1, 2, 8])
    with pytest.raises(AssertionError):
        tree.insert(record, 2, packed([8, 8]), span(7, rows=2))


def test_a_span_may_begin_inside_its_record() -> None:
    tree = tree_of([1, 2])
    walk = tree.walk(packed([1, 2, 3, 4]))
    tree.insert(walk.end, walk.offset, packed([3, 4]), span(2, rows=2, first_row=5))
    assert rows_of(tree, [1, 2, 3, 4]) == [(1, 0), (1, 1), (2, 5), (2, 6)]


def test_check_notices_a_wrong_count_and_a_lost_parent() -> None:
    tree = tree_of([1, 2, 3])
    tree.tokens += 1
    with pytest.raises(AssertionError):
        whole(tree.checks())
    tree = tree_of([1, 2, 3, 4, 5])
    next(iter(tree)).fork = 1
    with pytest.raises((AssertionError, KeyError)):
        whole(tree.checks())
