"""What is stored, as the tree knows it: records of rows, and checkpoints on them."""

from dataclasses import KW_ONLY, dataclass, field

from cachestore.extent import Extent


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first_row, first_row + rows) of one record.

    The record of a checkpoint has one row, the last one before its position; state instead of
    keys and values is the engine's business.
    """

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
class Stored:
    """Where bytes lie, and what keeps them there."""

    namespace: bytes
    span: Span
    _: KW_ONLY
    pins: int = 0
    last_used: int = 0
    # For people only: lookups that were served it, or rows of it, and the time of its last use.
    hits: int = 0
    used_at: float = 0.0

    @property
    def id(self) -> int:
        """Records and checkpoints share one count: what came later has a greater id."""
        return self.span.record_id

    @property
    def bytes_held(self) -> int:
        return self.span.extent.length


@dataclass(slots=True, eq=False)
class Record(Stored):
    """A node of the tree: a run of tokens, and the span of a record that holds their rows.

    It hangs on the first `fork` tokens of its parent's run. Children are found by their fork and
    the bytes of their first token. `marks` are the offsets, in 1..rows, at which stored sequences
    end, and checkpoints are found by such offsets, too. The root alone has an empty run and no
    parent.
    """

    run: bytes
    parent: "Record | None"
    fork: int
    # Of a namespace in which rows are of no use without a checkpoint.
    checkpointed: bool
    # Position of its first row in all its sequences.
    start: int
    marks: set[int] = field(default_factory=set)
    children: dict[tuple[int, bytes], "Record"] = field(default_factory=dict)
    checkpoints: dict[int, "Checkpoint"] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.span.rows

    @property
    def path(self) -> "tuple[Record, ...]":
        """From the record below the root down to this one."""
        path = [self]
        while (above := path[-1].parent) is not None and above.parent is not None:
            path.append(above)
        return tuple(reversed(path))

    @property
    def idle(self) -> bool:
        """Neither read nor written behind, and no checkpoint needs it: it may leave."""
        return self.pins == 0 and not self.children and not self.checkpoints

    @property
    def unreachable(self) -> bool:
        """Idle, and no lookup can be served any of it."""
        return self.checkpointed and self.idle


@dataclass(slots=True, eq=False)
class Checkpoint(Stored):
    """The state of the layers without rows, after the first `offset` tokens of a record's run."""

    record: Record
    offset: int

    @property
    def position(self) -> int:
        """Tokens before it, from the beginning of its sequences."""
        return self.record.start + self.offset

    @property
    def idle(self) -> bool:
        return self.pins == 0
