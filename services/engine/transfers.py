"""What was copied between the store and the engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfers:
    """Bytes copied, and the time that it took."""

    bytes: int = 0
    seconds: float = 0.0

    def plus(self, nbytes: int, seconds: float) -> "Transfers":
        return Transfers(self.bytes + nbytes, self.seconds + seconds)


NOTHING = Transfers()
