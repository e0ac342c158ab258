"""Which token sequences are held, and which rows of which records hold them."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import attrgetter

import numpy as np

from cachestore.config import TOKEN_BYTES
from cachestore.extent import Extent
from cachestore.node import Checkpoint, Record, Span

# At whatever is stored, to check it: that takes longer than elsewhere.
_LOOKS = 8


class MatchKind(IntEnum):
    """What a walk found, judged on the whole request. The first that applies counts."""

    EXACT = 1  # a stored sequence ends at the last token of the request
    SUPERSEQUENCE = 2  # the request ends inside something longer
    PREFIX = 3  # the walk stops where a stored sequence ends
    LCP = 4  # at least one row is shared
    MISS = 5


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a request leaves the tree: `depth` tokens agree, the last `offset` of them with the
    run of `end`, which is the last record of the path, or the root when nothing agrees."""

    path: tuple[Record, ...]
    end: Record
    offset: int
    depth: int
    kind: MatchKind

    def spans(self, rows: int) -> tuple[Span, ...]:
        """The first `rows` rows, one span for each record of the path that has some of them."""
        assert 0 <= rows <= self.depth
        spans: list[Span] = []
        for record, end in zip(self.path, _ends(self.path, self.offset), strict=True):
            if rows == 0:
                break
            taken = min(end, rows)
            whole = taken == record.span.rows
            spans.append(record.span if whole else replace(record.span, rows=taken))
            rows -= taken
        return tuple(spans)

    def place(self, position: int) -> tuple[Record, int]:
        """The record of the path with the last row before a position, and how many rows of it are
        before the position."""
        assert 1 <= position <= self.depth
        record = self.path[bisect_left(self.path, position, key=attrgetter("start")) - 1]
        return record, position - record.start

    def checkpoint(self, limit: int) -> Checkpoint | None:
        """The deepest one that all tokens before agree with, at most at position `limit`."""
        ends = _ends(self.path, self.offset)
        for record, end in zip(reversed(self.path), reversed(ends), strict=True):
            reach = min(end, limit - record.start)
            offset = max((o for o in record.checkpoints if o <= reach), default=0)
            if offset:
                return record.checkpoints[offset]
        return None

    def checkpoints(self) -> list[Checkpoint]:
        """All that the tokens agree with, by position."""
        return along(self.path, self.offset)


class Tree:
    """Radix tree over the sequences of one namespace.

    A run is never cut where sequences part: the other record hangs on an offset inside it. So
    nothing is copied, a walk takes one comparison for each record however often the path forks,
    and a leaf is always a whole record, whose removal frees its bytes.

                  0                          212               251
        record 7  ├─ You are a helpful ... ───┬─ ... Paris? ────┤
        record 9                              └─ ... Rome? ──┤
                                             fork            mark 37

    In a checkpointed tree checkpoints lie on offsets of runs, as marks do. `tokens`, `sequences`,
    `records` and `checkpoints` count what a walk can reach.
    """

    def __init__(self, namespace: bytes, checkpointed: bool = False) -> None:
        self.namespace = namespace
        self.checkpointed = checkpointed
        self.tokens = 0
        self.sequences = 0
        self.records = 0
        self.checkpoints = 0
        nothing = Span(0, Extent(0, 0, 0, 0), record_bytes=0, first_row=0, rows=0)
        self._root = Record(namespace, nothing, b"", None, 0, checkpointed, start=0)

    def walk(self, tokens: bytes) -> Walk:
        """The longest stored prefix of `tokens` (packed uint32). Changes nothing."""
        end, at, offset = self._root, 0, 0
        path: list[Record] = []
        while (child := end.children.get((offset, tokens[at : at + TOKEN_BYTES]))) is not None:
            end = child
            path.append(end)
            whole = tokens.startswith(end.run, at)
            offset = end.span.rows if whole else shared_tokens(tokens, at, end.run)
            at += offset * TOKEN_BYTES
        kind = _judge(end, offset, ended=at == len(tokens))
        return Walk(tuple(path), end, offset, at // TOKEN_BYTES, kind)

    def insert(self, parent: Record, fork: int, run: bytes, span: Span) -> Record:
        """Hang a run on the first `fork` tokens of `parent`, where a walk has left the tree."""
        assert len(run) == span.rows * TOKEN_BYTES > 0
        assert (parent is self._root and fork == 0) or 1 <= fork <= parent.rows
        assert parent.run[fork * TOKEN_BYTES :][:TOKEN_BYTES] != run[:TOKEN_BYTES]
        assert (fork, run[:TOKEN_BYTES]) not in parent.children
        start = parent.start + fork
        record = Record(self.namespace, span, run, parent, fork, self.checkpointed, start)
        parent.children[fork, run[:TOKEN_BYTES]] = record
        self.tokens += record.rows
        self.records += 1
        return record

    def mark(self, record: Record, offset: int) -> None:
        """Note that a sequence ends after the first `offset` tokens of the record's run."""
        assert 1 <= offset <= record.rows
        self.sequences += offset not in record.marks
        record.marks.add(offset)

    def attach(self, record: Record, offset: int, span: Span) -> Checkpoint:
        """Add a checkpoint after the first `offset` tokens of the record's run."""
        assert self.checkpointed
        assert 1 <= offset <= record.rows
        assert offset not in record.checkpoints
        checkpoint = Checkpoint(self.namespace, span, record, offset)
        record.checkpoints[offset] = checkpoint
        self.checkpoints += 1
        return checkpoint

    def detach(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.idle
        removed = checkpoint.record.checkpoints.pop(checkpoint.offset)
        assert removed is checkpoint
        self.checkpoints -= 1

    def remove(self, record: Record) -> Record | None:
        """Take out an idle record with its marks; return the one it hung on, if not the root."""
        assert record.idle
        parent = record.parent
        assert parent is not None
        removed = parent.children.pop((record.fork, record.run[:TOKEN_BYTES]))
        assert removed is record
        self.tokens -= record.rows
        self.sequences -= len(record.marks)
        self.records -= 1
        return parent if parent is not self._root else None

    def __iter__(self) -> Iterator[Record]:
        """All records, parents before their children."""
        pending = list(self._root.children.values())
        while pending:
            record = pending.pop()
            yield record
            pending.extend(record.children.values())

    def checks(self) -> Iterator[int]:
        """Verify every invariant, as Store.checks does."""
        assert self._root.rows == 0
        assert not self._root.marks
        assert not self._root.checkpoints
        ids: set[int] = set()
        tokens = sequences = records = checkpoints = 0
        for record in self:
            _check_record(record, self._root)
            assert record.id not in ids, "two ways to a record, or one that goes round in a circle"
            ids.add(record.id)
            ids.update(checkpoint.id for checkpoint in record.checkpoints.values())
            tokens += record.rows
            sequences += len(record.marks)
            records += 1
            checkpoints += len(record.checkpoints)
            yield _LOOKS * (1 + len(record.checkpoints))
        assert len(ids) == records + checkpoints
        assert self.records == records
        assert self.checkpoints == checkpoints
        assert self.checkpointed or not checkpoints
        assert self.tokens == tokens
        assert self.sequences == sequences


def along(path: Sequence[Record], offset: int) -> list[Checkpoint]:
    """The checkpoints on a path that ends after `offset` rows of its last record, by position."""
    return [
        record.checkpoints[at]
        for record, end in zip(path, _ends(path, offset), strict=True)
        for at in sorted(record.checkpoints)
        if at <= end
    ]


def shared_tokens(tokens: bytes, at: int, run: bytes) -> int:
    """How many tokens `run` and `tokens` from byte `at` on have in common."""
    count = min(len(tokens) - at, len(run)) // TOKEN_BYTES
    stored = np.frombuffer(run, dtype="<u4", count=count)
    asked = np.frombuffer(tokens, dtype="<u4", count=count, offset=at)
    differing = np.flatnonzero(stored != asked)
    return int(differing[0]) if differing.size else count


def _ends(path: Sequence[Record], offset: int) -> list[int]:
    """How many rows of each record belong to a path that ends so far into its last one."""
    return [*(record.fork for record in path[1:]), offset] if path else []


def _judge(end: Record, offset: int, ended: bool) -> MatchKind:
    """Kind of a walk that left the run of `end` after `offset` tokens."""
    if offset == 0:
        return MatchKind.MISS
    marked = offset in end.marks
    if ended and marked:
        return MatchKind.EXACT
    if ended and (offset < end.rows or any(fork == offset for fork, _ in end.children)):
        return MatchKind.SUPERSEQUENCE
    return MatchKind.PREFIX if marked else MatchKind.LCP


def _check_record(record: Record, root: Record) -> None:
    parent = record.parent
    assert parent is not None
    assert parent.children[record.fork, record.run[:TOKEN_BYTES]] is record
    assert record.namespace == root.namespace
    assert record.checkpointed == root.checkpointed
    assert min(1, parent.rows) <= record.fork <= parent.rows  # the root has none
    assert record.start == parent.start + record.fork
    assert len(record.run) == record.rows * TOKEN_BYTES > 0
    assert record.span.first_row >= 0
    assert 0 < record.span.record_bytes <= record.span.extent.length
    assert all(1 <= mark <= record.rows for mark in record.marks)
    # Two ways to the same tokens would make the walk depend on the order of insertion.
    goes_on = parent.run[record.fork * TOKEN_BYTES :][:TOKEN_BYTES]
    assert goes_on != record.run[:TOKEN_BYTES]
    for offset, checkpoint in record.checkpoints.items():
        assert checkpoint.record is record
        assert checkpoint.offset == offset
        assert 1 <= offset <= record.rows
        assert checkpoint.namespace == record.namespace
        assert (checkpoint.span.first_row, checkpoint.span.rows) == (0, 1)
        assert 0 < checkpoint.span.record_bytes <= checkpoint.span.extent.length
        assert checkpoint.id > record.id
