"""Who leaves first. A policy chooses victims; the store carries them out."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from sortedcontainers import SortedDict

from cachestore.node import Checkpoint, Record

Candidate: TypeAlias = Record | Checkpoint


class LeastRecentlyUsed:
    """One order over all namespaces. First go rows that no lookup can reach, and then whatever may
    leave and was not used for longest:

        rows that need no checkpoint   idle records, so from the ends of sequences
        checkpointed rows              checkpoints without a pin; rows become unreachable with the
                                       last checkpoint on or behind them

    Using a path makes all records of it as recent as its end, so a record is never more recent
    than the one it hangs on. A checkpoint has a recency of its own, for its neighbours are of no
    use to whom it serves. Uses are numbered. Records with the same number lie on one path, where
    at most one is idle, so the number alone orders the candidates. Every operation is
    O(log candidates), beside the length of the path.
    """

    def __init__(self) -> None:
        self._uses = 0
        self._unreachable: dict[Record, None] = {}
        self._candidates: SortedDict[int, Candidate] = SortedDict()

    def __len__(self) -> int:
        return len(self._unreachable) + len(self._candidates)

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

    def use_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._withdraw(checkpoint)
        self._uses += 1
        checkpoint.last_used = self._uses
        self.settle(checkpoint)

    def settle(self, candidate: Candidate) -> None:
        """Take note that something in a tree may have become idle, or may no longer be."""
        if not candidate.idle:
            self._withdraw(candidate)
        elif isinstance(candidate, Record) and candidate.unreachable:
            self._unreachable[candidate] = None
        else:
            held = self._candidates.setdefault(candidate.last_used, candidate)
            assert held is candidate

    def forget(self, candidate: Candidate) -> None:
        """It has left its tree."""
        self._withdraw(candidate)

    def victim(self) -> Candidate | None:
        """What to remove next; None when nothing may leave."""
        victim: Candidate | None = next(iter(self._unreachable), None)
        if victim is None and self._candidates:
            victim = self._candidates.peekitem(0)[1]
        assert victim is None or victim.idle
        return victim

    def checks(self, stored: Sequence[Candidate]) -> Iterator[int]:
        """Verify the candidates, as Store.checks does, against all that is in a tree."""
        unreachable = candidates = 0
        for each in stored:
            assert 0 < each.last_used <= self._uses
            if isinstance(each, Record) and each.unreachable:
                assert each in self._unreachable
                unreachable += 1
            elif each.idle:
                assert self._candidates.get(each.last_used) is each
                candidates += 1
            yield 1
        assert len(self._unreachable) == unreachable
        assert len(self._candidates) == candidates

    def _withdraw(self, candidate: Candidate) -> None:
        if isinstance(candidate, Record):
            self._unreachable.pop(candidate, None)
        if self._candidates.get(candidate.last_used) is candidate:
            del self._candidates[candidate.last_used]
