"""Every limit of the cachestore, with its default stated once."""

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

BUDGET_BYTES_MIN = 16 * MIB
SLAB_BYTES_MAX = 256 * MIB
SLABS_PER_BUDGET_MIN = 8
# Slabs are whole pages on every platform (16 KiB on Apple Silicon).
SLAB_UNIT_BYTES = 16 * KIB
EXTENT_UNIT_BYTES = 256

NAMESPACE_BYTES = 32
TOKEN_BYTES = 4
LABEL_BYTES_MAX = 256
RECORD_OVERHEAD_BYTES_MAX = MIB
ROW_BYTES_MAX = GIB
LEASE_IDS_PER_CALL_MAX = 4096
WAIT_SECONDS_MAX = 120
ENTRIES_PER_CALL_MAX = 256
CHECKPOINTS_PER_CALL_MAX = 64
# Of one message, either way.
MESSAGE_BYTES_MAX = 8 * MIB
CHECKPOINTS_MAX, CHECKPOINTS_MAX_MIN = 8, 2

# Of a log file, and how many full ones are kept beside it.
LOG_BYTES_MAX, LOG_FILES_BEFORE = 8 * MIB, 4


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Limits of one store. Flags refuse what no store can have."""

    budget_bytes: int
    # Of one sequence of a conversation, again of its other branches, and of what it shares with
    # others before it begins. A turn adds one, or two: before the last token of the prompt, and
    # after a reply that is not short.
    checkpoints_max: int = CHECKPOINTS_MAX
    record_tokens: int = 256
    lease_seconds: float = 30.0
    reservation_seconds: float = 30.0
    # How long the store rather evicts than grows after the system had no memory for a slab.
    growth_pause_seconds: float = 30.0
    max_tokens: int = 1 << 20
    max_namespaces: int = 4096
    max_leases_per_session: int = 4096
    max_reservations_per_session: int = 1024
    # A longer write takes several: the store is busy for about 30 µs with each record.
    max_records_per_reservation: int = 256
    max_pinned: int = 4096
    # Announced tokens are kept, 4 bytes each.
    max_announced_tokens_per_session: int = 1 << 22
    # A wake-up compares up to 0.1 ms for each, of 50,000 tokens.
    max_waiting: int = 128
    # Tests ask for slabs of a few hundred bytes; the budget then has no minimum.
    slab_bytes_override: int | None = None

    def __post_init__(self) -> None:
        if self.slab_bytes_override is not None:
            assert 0 < self.slab_bytes_override <= self.budget_bytes
            assert self.slab_bytes_override % EXTENT_UNIT_BYTES == 0
        else:
            assert self.budget_bytes >= BUDGET_BYTES_MIN
        assert self.checkpoints_max >= CHECKPOINTS_MAX_MIN

    @property
    def slab_bytes(self) -> int:
        if self.slab_bytes_override is not None:
            return self.slab_bytes_override
        wanted = min(SLAB_BYTES_MAX, self.budget_bytes // SLABS_PER_BUDGET_MIN)
        return wanted // SLAB_UNIT_BYTES * SLAB_UNIT_BYTES

    def next_slab_bytes(self, bytes_slabs: int, longest: int) -> int:
        """Size of the slab that may be added to `bytes_slabs` for extents, the longest of which has
        so many bytes; 0 when the budget is used up.

        Larger than others for a checkpoint that would not fit one. The last slab may be smaller
        than the others, so that little of the budget lies idle.
        """
        unit = min(SLAB_UNIT_BYTES, self.slab_bytes)
        left = self.budget_bytes - bytes_slabs
        wanted = max(self.slab_bytes, -(-longest // unit) * unit)
        return min(wanted, left // unit * unit)
