"""What a person may want to see, keep, or be rid of. An entry is one record."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cachestore.config import StoreConfig
from cachestore.holdings import Holdings
from cachestore.refusal import RefusalCode, Refused
from cachestore.tree import Record, Span
from cachestore.validation import exhausted


@dataclass(frozen=True, slots=True)
class Entry:
    """Rows [first_token, first_token + span.rows) of its sequences, `sequences` of which end here.

    `parent_id` is the record whose rows come before, 0 for none. `claims` are what keeps it from
    being evicted now: leases, reservations, pins, also of records behind it.
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


@dataclass(frozen=True, slots=True)
class Evicted:
    """`kept` records were in use or pinned, or had such records behind them."""

    records: int
    bytes: int
    kept: int


class Catalog:
    """Pins are by record, and cover the path up to it. They end with the daemon, or by `unpin`."""

    def __init__(self, config: StoreConfig, holdings: Holdings) -> None:
        self._config = config
        self._holdings = holdings
        self._pinned: dict[int, tuple[Record, ...]] = {}

    @property
    def pinned(self) -> int:
        return len(self._pinned)

    def find(self, record_id: int) -> Record:
        record = self._holdings.records.get(record_id)
        if record is None:
            raise Refused(RefusalCode.NOT_FOUND, f"record_id {record_id}: there is no such record")
        return record

    def entries(self, namespace: bytes, after: int, limit: int, now: float) -> list[Entry]:
        """Of one namespace, or of all when it is empty, in the order of their ids."""
        held = (
            record
            for record_id, record in self._holdings.records.items()
            if record_id > after and namespace in (b"", record.namespace)
        )
        return [self.entry(record, now) for record in itertools.islice(held, limit)]

    def entry(self, record: Record, now: float) -> Entry:
        path = record.path
        return Entry(
            namespace=record.namespace,
            span=record.span,
            parent_id=path[-2].span.record_id if len(path) > 1 else 0,
            first_token=sum(above.fork for above in path),
            sequences=len(record.marks),
            hits=record.hits,
            age_seconds=now - record.used_at,
            claims=record.pins,
            pinned=record.span.record_id in self._pinned,
        )

    def everything(self, namespace: bytes = b"") -> list[int]:
        """All records, or those of one namespace; each before the one that it hangs on."""
        records = self._holdings.records.values()
        # A record is always younger than the one it hangs on.
        return [r.span.record_id for r in reversed(records) if namespace in (b"", r.namespace)]

    def behind(self, record_id: int) -> list[int]:
        """A record and all that hang on it, in the same order."""
        found = [self.find(record_id)]
        for record in found:
            found.extend(record.children.values())
        return sorted((record.span.record_id for record in found), reverse=True)

    def evict(self, record_ids: Sequence[int]) -> Evicted:
        """Drop those that may leave; in the order given by `everything` and `behind`."""
        dropped = size = kept = 0
        for record_id in record_ids:
            record = self._holdings.records.get(record_id)
            if record is not None and record.idle:
                self._holdings.drop(record)
                dropped += 1
                size += record.bytes_held
            elif record is not None:
                kept += 1
        return Evicted(dropped, size, kept)

    def pin(self, record_id: int) -> tuple[Record, ...]:
        """Keep a record and all before it; returns them. A second time changes nothing."""
        path = self.find(record_id).path
        if record_id not in self._pinned:
            if len(self._pinned) >= self._config.max_pinned:
                raise exhausted(f"record_id: {len(self._pinned)} are pinned; unpin some first")
            self._holdings.pin(path)
            self._pinned[record_id] = path
        return path

    def unpin(self, record_id: int) -> None:
        """Undo a pin. Raises Refused when there is none."""
        path = self._pinned.pop(record_id, None)
        if path is None:
            raise Refused(RefusalCode.NOT_FOUND, f"record_id {record_id} is not pinned")
        self._holdings.unpin(path)

    def paths(self) -> list[tuple[Record, ...]]:
        """What is pinned here, once for each pin."""
        return list(self._pinned.values())

    def check(self) -> None:
        for record_id, path in self._pinned.items():
            assert self._holdings.records[record_id].path == path
