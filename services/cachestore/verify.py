"""Everything that is held, read and checked, a little at a time."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cachestore import node, record
from cachestore.check import Check
from cachestore.config import TOKEN_BYTES
from cachestore.eviction import Candidate
from cachestore.store import Extent, Store

SLICE_SECONDS = 0.005
# A store in use can change each time before all of it has been looked at.
ATTEMPTS_MAX = 100


@dataclass(slots=True)
class Progress:
    """The fields of VerifyResponse in the proto."""

    records_done: int
    records_total: int
    bytes_done: int
    bytes_total: int
    problems: list[str] = field(default_factory=list)


def verify(store: Store, now: float, memory: Callable[[Extent], memoryview]) -> Iterator[Progress]:
    """Reads each record that is held at the beginning, all but the rows' own bytes, of which
    nothing is known, and then checks the bookkeeping, which makes a store that contradicts itself
    fail.

    The store may change between two steps, each of which takes about 5 ms.
    """
    ids, statistics = list(store.stored)[::-1], store.statistics(now)
    progress = Progress(0, len(ids), 0, statistics.bytes_used - statistics.bytes_padding)
    # Records of rows are alike, and so are checkpoints.
    like: dict[type, record.Record] = {}
    deadline = time.perf_counter() + SLICE_SECONDS
    for record_id in ids:
        held = store.stored.get(record_id)
        if held is not None:
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
    check = Check(store)
    while not check.over and check.attempts <= ATTEMPTS_MAX:
        yield progress
        progress.problems.clear()
        check.step()
    if check.problem:
        progress.problems.append(check.problem)
    elif not check.over:
        progress.problems.append("the bookkeeping was not checked: the store is too busy for it")
    yield progress


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
    if not found.belongs(memory, _path(held)):
        raise record.RecordError("it is of other tokens than the tree has")
    return found


def _path(held: Candidate) -> bytes:
    """What the record says that it is of, by the tree (see record.paths)."""
    if isinstance(held, node.Checkpoint):
        tokens, rows = _tokens(held.record), range(held.position - 1, held.position)
    else:
        first = held.start - held.span.first_row
        tokens, rows = _tokens(held), range(first, held.start + held.rows)
    (path,) = record.paths(held.namespace, tokens, [rows])
    return path


def _tokens(held: node.Record) -> bytes:
    """From the beginning of its sequences to the end of its run."""
    runs = [above.run[: below.fork * TOKEN_BYTES] for above, below in itertools.pairwise(held.path)]
    return b"".join([*runs, held.run])
