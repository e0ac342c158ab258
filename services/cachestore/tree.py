"""Which token sequences are held, and which rows of which records hold them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from cachestore.arena import Extent
from cachestore.config import TOKEN_BYTES


class MatchKind(IntEnum):
    """What a walk found, judged on the whole request. The first that applies counts."""

    EXACT = 1  # a stored sequence ends at the last token of the request
    SUPERSEQUENCE = 2  # the request ends inside something longer
    PREFIX = 3  # the walk stops where a stored sequence ends
    LCP = 4  # at least one row is shared
    MISS = 5


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first_row, first_row + rows) of one record."""

    record_id: int
    extent: Extent
    record_bytes: int
    first_row: int
    rows: int

    @property
    def bytes_padding(self) -> int:
        return self.extent.length - self.record_bytes

    @property
    def bytes_stranded(self) -> int:
        """Bytes, in proportion, of the record's rows before the span; another record has them."""
        return self.record_bytes * self.first_row // (self.first_row + self.rows)


@dataclass(slots=True, eq=False)
class Record:
    """A node of the tree: a run of tokens, and the span of a record that holds their rows.

    It hangs on the first `fork` tokens of its parent's run. Children are found by their fork and
    the bytes of their first token. `marks` are the offsets, in 1..rows, at which stored sequences
    end. The root alone has an empty run and no parent.
    """

    namespace: bytes
    run: bytes
    span: Span
    parent: "Record | None"
    fork: int
    marks: set[int] = field(default_factory=set)
    children: dict[tuple[int, bytes], "Record"] = field(default_factory=dict)
    pins: int = 0
    last_used: int = 0
    # For people only: lookups that were served rows of it, and the time of its last use.
    hits: int = 0
    used_at: float = 0.0

    @property
    def rows(self) -> int:
        return self.span.rows

    @property
    def bytes_held(self) -> int:
        return self.span.extent.length

    @property
    def path(self) -> "tuple[Record, ...]":
        """From the record below the root down to this one."""
        path = [self]
        while (above := path[-1].parent) is not None and above.parent is not None:
            path.append(above)
        return tuple(reversed(path))

    @property
    def idle(self) -> bool:
        """Neither read nor written behind: it may leave."""
        return self.pins == 0 and not self.children


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
        ends = [record.fork for record in self.path[1:]] + [self.offset]
        spans: list[Span] = []
        for record, end in zip(self.path, ends, strict=False):
            if rows == 0:
                break
            taken = min(end, rows)
            whole = taken == record.span.rows
            spans.append(record.span if whole else replace(record.span, rows=taken))
            rows -= taken
        return tuple(spans)


class Tree:
    """Radix tree over the sequences of one namespace.

    A run is never cut where sequences part: the other record hangs on an offset inside it. So
    nothing is copied, a walk takes one comparison for each record however often the path forks,
    and a leaf is always a whole record, whose removal frees its bytes.

                  0                          212               251
        record 7  ├─ You are a helpful ... ───┬─ ... Paris? ────┤
        record 9                              └─ ... Rome? ──┤
                                             fork            mark 37

    `tokens`, `sequences` and `records` count what a walk can reach.
    """

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self.tokens = 0
        self.sequences = 0
        self.records = 0
        nothing = Span(0, Extent(0, 0, 0, 0), record_bytes=0, first_row=0, rows=0)
        self._root = Record(namespace, run=b"", span=nothing, parent=None, fork=0)

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
        record = Record(self.namespace, run, span, parent, fork)
        parent.children[fork, run[:TOKEN_BYTES]] = record
        self.tokens += record.rows
        self.records += 1
        return record

    def mark(self, record: Record, offset: int) -> None:
        """Note that a sequence ends after the first `offset` tokens of the record's run."""
        assert 1 <= offset <= record.rows
        self.sequences += offset not in record.marks
        record.marks.add(offset)

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

    def check(self) -> None:
        """Verify every invariant, in time proportional to the whole tree."""
        assert self._root.rows == 0
        assert not self._root.marks
        assert all(fork == 0 for fork, _ in self._root.children)
        records = list(self)
        for record in records:
            _check_record(record, self._root)
        ids = {record.span.record_id for record in records}
        assert len(ids) == len(records) == self.records
        assert self.tokens == sum(record.rows for record in records)
        assert self.sequences == sum(len(record.marks) for record in records)


def shared_tokens(tokens: bytes, at: int, run: bytes) -> int:
    """How many tokens `run` and `tokens` from byte `at` on have in common."""
    count = min(len(tokens) - at, len(run)) // TOKEN_BYTES
    stored = np.frombuffer(run, dtype="<u4", count=count)
    asked = np.frombuffer(tokens, dtype="<u4", count=count, offset=at)
    differing = np.flatnonzero(stored != asked)
    return int(differing[0]) if differing.size else count


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
    assert len(record.run) == record.rows * TOKEN_BYTES > 0
    assert record.span.first_row >= 0
    assert 0 < record.span.record_bytes <= record.span.extent.length
    assert all(1 <= mark <= record.rows for mark in record.marks)
    assert all(1 <= fork <= record.rows for fork, _ in record.children)
    # Two ways to the same tokens would make the walk depend on the order of insertion.
    goes_on = parent.run[record.fork * TOKEN_BYTES :][:TOKEN_BYTES]
    assert goes_on != record.run[:TOKEN_BYTES]
