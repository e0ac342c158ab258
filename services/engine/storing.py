"""How packed rows and checkpoints get into the cachestore; on a helper thread, without MLX."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc
import numpy as np

from cachestore.client import Client, NewCheckpoint, Reservation, StoreRefused
from cachestore.record import paths
from engine import pack
from engine.pack import PackedCheckpoint, PackedRows


class PathLost(Exception):
    """The store evicts a write faster than it grows. The store is well, so this is no
    StoreUnavailable, which would keep everybody from it for a moment."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a sequence: its last rows, and checkpoints behind the first of them.

    Rows may go on behind the last token; those are not stored. `conversation_start`: as
    checkpoints.Boundaries says, 0 when it is not known.
    """

    tokens: tuple[int, ...]
    rows: tuple[PackedRows, ...]
    checkpoints: tuple[PackedCheckpoint, ...] = ()
    conversation_start: int = 0

    def __post_init__(self) -> None:
        assert self.rows[0].first_token < len(self.tokens) <= self.rows[-1].end
        assert all(
            self.rows[0].first_token < each.position <= len(self.tokens)
            for each in self.checkpoints
        )

    @property
    def nbytes(self) -> int:
        rows = sum(part.nbytes for part in self.rows)
        return rows + sum(each.nbytes for each in self.checkpoints)


@dataclass(frozen=True, slots=True)
class Stored:
    """What one reservation came to: the first `end` tokens are held, `nbytes` were written."""

    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Destination:
    """A namespace of a store, and what people call it."""

    client: Client
    namespace: bytes
    label: str
    checkpointed: bool

    def store(self, tail: Tail) -> int:
        """All of it or, when the store has no room for so much, the deepest checkpoint and the
        rows up to it; returns how many bytes. StoreUnavailable, StoreRefused and PathLost."""
        try:
            return self._store(tail)
        except StoreRefused as refusal:
            full = refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            if not full or len(tail.checkpoints) < 2:
                raise
            deepest = tail.checkpoints[-1]
            tokens = tail.tokens[: deepest.position]
            return self._store(replace(tail, tokens=tokens, checkpoints=(deepest,)))

    def _store(self, tail: Tail) -> int:
        """One codec after the other: records have one, and a reservation the sizes of one."""
        nbytes = 0
        for run in pack.runs(tail.rows):
            if run[0].first_token >= len(tail.tokens):
                break
            end = min(run[-1].end, len(tail.tokens))
            held = 0
            while held < end:
                stored = self._store_some(tail, run, end)
                if stored.end <= held:
                    raise PathLost("rows leave before the rest of their path follows")
                held = stored.end
                nbytes += stored.nbytes
        return nbytes

    def _store_some(self, tail: Tail, run: Sequence[PackedRows], end: int) -> Stored:
        """Write as much as one reservation takes of the first `end` tokens, for which there are
        rows of one codec."""
        tokens = packed_tokens(tail.tokens[:end])
        first = run[0].first_token
        among = [each for each in tail.checkpoints if first < each.position <= end]
        checkpoints = {each.position: each for each in among}
        codec = run[0].codec
        # Rows before the first came from the store or are on their way to it: when it lacks
        # them, this is refused. They are never encoded a second time.
        reservation = self.client.reserve(
            self.namespace,
            tokens,
            first,
            codec.record_overhead_bytes,
            codec.row_bytes,
            self.label,
            checkpointed=self.checkpointed,
            checkpoints=[NewCheckpoint(at, each.nbytes) for at, each in checkpoints.items()],
            conversation_start=tail.conversation_start if tail.conversation_start <= end else 0,
        )
        try:
            rows = self._write_rows(reservation, tokens, run)
            states = self._write_checkpoints(reservation, tokens, checkpoints)
        except BaseException:
            self.client.abort(reservation.id)
            raise
        self.client.commit(reservation.id, rows, states)
        return Stored(reservation.end, sum(rows) + sum(states))

    def _write_rows(
        self, reservation: Reservation, tokens: bytes, packed: Sequence[PackedRows]
    ) -> list[int]:
        """Bytes written of each piece."""
        pieces = reservation.pieces
        rows = [range(piece.first_token, piece.first_token + piece.rows) for piece in pieces]
        return [
            pack.write(packed, piece.first_token, piece.rows, path, self.client.extent(piece))
            for piece, path in zip(pieces, paths(self.namespace, tokens, rows), strict=True)
        ]

    def _write_checkpoints(
        self, reservation: Reservation, tokens: bytes, packed: dict[int, PackedCheckpoint]
    ) -> list[int]:
        """Bytes written of each staged checkpoint, which says whose last row it stands behind."""
        staged = reservation.checkpoints
        rows = [range(each.position - 1, each.position) for each in staged]
        return [
            pack.write_checkpoint(packed[each.position], path, self.client.extent(each))
            for each, path in zip(staged, paths(self.namespace, tokens, rows), strict=True)
        ]


def packed_tokens(tokens: tuple[int, ...]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()
