"""Everything that is held, read and checked, a little at a time."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cachestore import record
from cachestore.eviction import Candidate
from cachestore.store import Extent, Store

SLICE_SECONDS = 0.005

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """The fields of VerifyResponse in the proto."""

    records_done: int
    records_total: int
    bytes_done: int
    bytes_total: int
    problems: list[str] = field(default_factory=list)


def verify(store: Store, now: float, memory: Callable[[Extent], memoryview]) -> Iterator[Progress]:
    """Reads each record that is held at the beginning, and then checks the bookkeeping.

    The store may change between two steps, each of which takes 5 ms, but for the last one: that
    takes about 7 µs for each record, and makes a store that contradicts itself fail.
    """
    ids = store.catalog(now).everything()
    progress = Progress(0, len(ids), 0, sum(r.span.record_bytes for r in _held(store, ids)))
    # Records of rows are alike, and so are checkpoints.
    like: dict[type, record.Record] = {}
    deadline = time.perf_counter() + SLICE_SECONDS
    for record_id in ids:
        for held in _held(store, [record_id]):
            try:
                like[type(held)] = _read(held, memory(held.span.extent), like.get(type(held)))
            except (record.RecordError, ValueError) as error:
                progress.problems.append(f"record {record_id}: {error}")
            progress.bytes_done += held.span.record_bytes
        progress.records_done += 1
        if time.perf_counter() > deadline:
            yield progress
            progress.problems.clear()
            deadline = time.perf_counter() + SLICE_SECONDS
    try:
        store.check()
    except Exception as error:
        _log.exception("the store contradicts itself and serves nothing from now on")
        store.fail()
        progress.problems.append(f"the bookkeeping contradicts itself: {error}; see the log")
    yield progress


def _held(store: Store, record_ids: list[int]) -> Iterator[Candidate]:
    return (held for held in map(store.stored.get, record_ids) if held is not None)


def _read(held: Candidate, memory: memoryview, like: record.Record | None) -> record.Record:
    found = record.read(memory[: held.span.record_bytes], like)
    if found.record_bytes != held.span.record_bytes:
        raise record.RecordError(
            f"{found.record_bytes} bytes, but {held.span.record_bytes} were committed"
        )
    if found.rows != held.span.first_row + held.span.rows:
        raise record.RecordError(
            f"{found.rows} rows, but the tree has {held.span.first_row + held.span.rows}"
        )
    return found
