"""Who leaves first. A policy chooses victims; the store carries them out."""

from collections.abc import Sequence

from sortedcontainers import SortedDict

from cachestore.tree import Record


class LeastRecentlyUsed:
    """The idle record whose last use is longest ago, over all namespaces.

    Using a path makes all records of it as recent as its end, so a record is never more recent
    than the one it hangs on. Uses are numbered. Records with the same number lie on one path,
    where at most one is idle, so the number alone orders the candidates. Every operation is
    O(log candidates), beside the length of the path.
    """

    def __init__(self) -> None:
        self._uses = 0
        self._candidates: SortedDict[int, Record] = SortedDict()

    def __len__(self) -> int:
        return len(self._candidates)

    def use(self, path: Sequence[Record]) -> None:
        """Make the records of a path, from the root down, the most recent ones."""
        if not path:
            return
        # All above the last one have children, and so are no candidates.
        self._withdraw(path[-1])
        self._uses += 1
        for record in path:
            record.last_used = self._uses
        self.settle(path[-1])

    def settle(self, record: Record) -> None:
        """Take note that a record in a tree may have become idle, or may no longer be."""
        if not record.idle:
            self._withdraw(record)
        elif record.last_used not in self._candidates:
            self._candidates[record.last_used] = record
        else:
            assert self._candidates[record.last_used] is record

    def forget(self, record: Record) -> None:
        """The record has left its tree."""
        self._withdraw(record)

    def victim(self) -> Record | None:
        """The record to remove next; None when nothing may leave."""
        if not self._candidates:
            return None
        record: Record = self._candidates.peekitem(0)[1]
        assert record.idle
        return record

    def check(self, records: Sequence[Record]) -> None:
        """Verify the candidates against all records that are in a tree."""
        idle = {record.last_used: record for record in records if record.idle}
        assert len(idle) == sum(record.idle for record in records)
        assert dict(self._candidates) == idle
        assert all(0 < record.last_used <= self._uses for record in records)

    def _withdraw(self, record: Record) -> None:
        if self._candidates.get(record.last_used) is record:
            del self._candidates[record.last_used]
