"""What a person may want to see, keep, or be rid of. An entry is one record or checkpoint."""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cachestore.config import StoreConfig
from cachestore.eviction import Candidate
from cachestore.holdings import Holdings, Kept
from cachestore.node import Checkpoint, Record, Span
from cachestore.refusal import RefusalCode, Refused
from cachestore.tree import along
from cachestore.validation import exhausted, require_sequence


@dataclass(frozen=True, slots=True)
class Entry:
    """Rows [first_token, first_token + span.rows) of its sequences, `sequences` of which end here;
    or a checkpoint at position `checkpoint`, which is 0 for rows.

    `parent_id` is the record whose rows come before, 0 for none; for a checkpoint the one that it
    lies on. `claims` are what keeps it from being evicted now: leases, reservations, pins, also of
    records behind it.
    """

    namespace: bytes
    span: Span
    parent_id: int
    first_token: int
    sequences: int
    hits: int
    age_seconds: float
    claims: int
    pinned: bool
    checkpoint: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """`bytes` are those of records and checkpoints. `kept` ones of both were in use or pinned, or
    had such behind them."""

    records: int
    checkpoints: int
    bytes: int
    kept: int


class Catalog:
    """Pins are by record or checkpoint, and cover the path up to it with all checkpoints there.
    They end with the daemon, or by `unpin`."""

    def __init__(self, config: StoreConfig, holdings: Holdings) -> None:
        self._config = config
        self._holdings = holdings
        self._pinned: dict[int, Kept] = {}

    @property
    def pinned(self) -> int:
        return len(self._pinned)

    def find(self, record_id: int) -> Candidate:
        stored = self._holdings.inventory.stored.get(record_id)
        if stored is None:
            raise Refused(RefusalCode.NOT_FOUND, f"record_id {record_id}: there is no such record")
        return stored

    def entries(self, namespace: bytes, after: int, limit: int, now: float) -> list[Entry]:
        """Of one namespace, or of all when it is empty, in the order of their ids."""
        held = (
            stored
            for record_id, stored in self._holdings.inventory.stored.items()
            if record_id > after and namespace in (b"", stored.namespace)
        )
        return [self.entry(stored, now) for stored in itertools.islice(held, limit)]

    def records(self) -> list[Record]:
        """All that hold rows."""
        held = self._holdings.inventory.stored.values()
        return [stored for stored in held if isinstance(stored, Record)]

    def entry(self, stored: Candidate, now: float) -> Entry:
        if isinstance(stored, Checkpoint):
            above, first_token = stored.record, stored.position - 1
            sequences, checkpoint = 0, stored.position
        else:
            assert stored.parent is not None
            above, first_token = stored.parent, stored.start
            sequences, checkpoint = len(stored.marks), 0
        return Entry(
            namespace=stored.namespace,
            span=stored.span,
            parent_id=above.id,
            first_token=first_token,
            sequences=sequences,
            hits=stored.hits,
            age_seconds=now - stored.used_at,
            claims=stored.pins,
            pinned=stored.id in self._pinned,
            checkpoint=checkpoint,
        )

    def everything(self, namespace: bytes = b"") -> list[int]:
        """All that is held, or that of one namespace; each before the record that it hangs on."""
        held = self._holdings.inventory.stored.values()
        # What hangs on a record is always younger.
        return [each.id for each in reversed(held) if namespace in (b"", each.namespace)]

    def behind(self, record_id: int) -> list[int]:
        """A record or checkpoint and all that hang on it, in the same order."""
        found = [self.find(record_id)]
        for stored in found:
            if isinstance(stored, Record):
                found += [*stored.children.values(), *stored.checkpoints.values()]
        return sorted((stored.id for stored in found), reverse=True)

    def evict(self, record_ids: Sequence[int]) -> Evicted:
        """Drop those that may leave, and what no lookup can reach without them; in the order given
        by `everything` and `behind`."""
        gone: list[Candidate] = []
        kept = 0
        for record_id in record_ids:
            stored = self._holdings.inventory.stored.get(record_id)
            if stored is not None and stored.idle:
                gone += self._holdings.evict(stored)
            elif stored is not None:
                kept += 1
        checkpoints = sum(isinstance(stored, Checkpoint) for stored in gone)
        size = sum(stored.bytes_held for stored in gone)
        return Evicted(len(gone) - checkpoints, checkpoints, size, kept)

    def pin(self, record_id: int) -> Kept:
        """Keep a record and all before it, with the checkpoints there are; returns them. A second
        time changes nothing."""
        if record_id not in self._pinned:
            stored = self.find(record_id)
            if len(self._pinned) >= self._config.max_pinned:
                raise exhausted(f"record_id: {len(self._pinned)} are pinned; unpin some first")
            kept = _up_to(stored)
            self._holdings.pin(kept)
            self._pinned[record_id] = kept
        return self._pinned[record_id]

    def end_of(self, namespace: bytes, tokens: bytes) -> Candidate:
        """What holds the last row of a sequence or, where rows need them, the checkpoint at its
        end. Raises Refused when not all of it is held."""
        count = require_sequence(namespace, tokens, self._config.max_tokens)
        walk = self._holdings.walk(namespace, tokens)
        found: Candidate = walk.end
        held = walk.depth
        if self._holdings.checkpointed(namespace):
            checkpoint = walk.checkpoint(count)
            held = 0 if checkpoint is None else checkpoint.position
            found = found if checkpoint is None else checkpoint
        if held < count:
            message = f"tokens: of {count} a lookup could be served {held}"
            raise Refused(RefusalCode.NOT_FOUND, message)
        return found

    def unpin(self, record_id: int) -> None:
        """Undo a pin. Raises Refused when there is none."""
        kept = self._pinned.pop(record_id, None)
        if kept is None:
            raise Refused(RefusalCode.NOT_FOUND, f"record_id {record_id} is not pinned")
        self._holdings.unpin(kept)

    def kept(self) -> list[Kept]:
        """What is pinned here, once for each pin."""
        return list(self._pinned.values())

    def checks(self) -> Iterator[int]:
        """Verify every invariant, as Store.checks does."""
        for record_id, kept in self._pinned.items():
            now = _up_to(self._holdings.inventory.stored[record_id])
            assert now.path == kept.path
            assert set(kept.checkpoints) <= set(now.checkpoints)
            yield len(now.stored)


def busiest(records: Iterable[Record], limit: int) -> list[Record]:
    """Of these records, those at which the prefixes end that lookups were served most tokens of,
    best first.

    Whoever was served rows of a record was served all before it. So a prefix ends where fewer go
    on, and its worth is its length times the hits of its last record:

        record 7 ── 12 hits ──┬── record 8 ── 12 hits, ends ──┬── record 9 ── 3 hits, ends
    """
    ends = (
        record
        for record in records
        if record.hits and all(child.hits < record.hits for child in record.children.values())
    )
    return heapq.nlargest(limit, ends, key=lambda record: record.hits * _end(record))


def _end(record: Record) -> int:
    """Tokens up to its last one."""
    return record.start + record.rows


def _up_to(stored: Candidate) -> Kept:
    """The path to the end of a record, or to a checkpoint, with all checkpoints on it."""
    record, end = (
        (stored.record, stored.offset) if isinstance(stored, Checkpoint) else (stored, stored.rows)
    )
    path = record.path
    return Kept(path, tuple(along(path, end)))
