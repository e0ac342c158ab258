"""What the engine tells of its cachestore."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfers:
    """Bytes copied, and the time that it took."""

    bytes: int = 0
    seconds: float = 0.0

    def plus(self, nbytes: int, seconds: float) -> "Transfers":
        return Transfers(self.bytes + nbytes, self.seconds + seconds)


NOTHING = Transfers()


@dataclass(frozen=True, slots=True)
class PrefixStatus:
    """What GetModel and Stats show. `namespace` is empty while it is not known."""

    codec: str
    not_cached_reason: str
    namespace: bytes
    connected: bool
    writes_committed: int
    writes_dropped: int
    attached: Transfers = NOTHING
    stored: Transfers = NOTHING


@dataclass(frozen=True, slots=True)
class Pinned:
    """What stays in the store: `record_id` is at the end of a prompt, `nbytes` are all up to it."""

    record_id: int
    nbytes: int
