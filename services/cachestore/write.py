"""What a write consists of: to the store, and as far as they speak of it to a client."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cachestore.config import TOKEN_BYTES
from cachestore.extent import Extent


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """A checkpoint that a writer has: after `position` tokens, in at most `nbytes` bytes."""

    position: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One record to be written: rows [first_token, first_token + rows) of a sequence."""

    extent: Extent
    first_token: int
    rows: int


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """One checkpoint to be written."""

    extent: Extent
    position: int


@dataclass(frozen=True, slots=True)
class Target:
    """What a write is for: the whole sequence, and how large its records get. The writer has rows
    from `first_row` on. Once staged, as much of the sequence as is staged, and whether that is all
    of it."""

    namespace: bytes
    tokens: bytes
    first_row: int
    record_overhead_bytes: int
    row_bytes: int
    label: str
    checkpointed: bool = False
    checkpoints: tuple[NewCheckpoint, ...] = ()
    conversation_start: int = 0
    whole: bool = True

    @property
    def count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def until(self, end: int) -> "Target":
        """Its first `end` tokens."""
        if end == self.count:
            return self
        return replace(self, tokens=self.tokens[: end * TOKEN_BYTES], whole=False)


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows behind those that are held, in order, and checkpoints, by position."""

    target: Target
    pieces: tuple[Piece, ...]
    checkpoints: tuple[StagedCheckpoint, ...]

    @property
    def extents(self) -> list[Extent]:
        rows = [piece.extent for piece in self.pieces]
        return rows + [checkpoint.extent for checkpoint in self.checkpoints]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes written of each record, in the order of `Staged`."""

    records: Sequence[int]
    checkpoints: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Inserted:
    """What a commit has added."""

    rows: int
    checkpoints: int
