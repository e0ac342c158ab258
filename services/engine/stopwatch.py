"""Where the time of a request went."""

import enum
from collections.abc import Mapping

from engine.request import Timing


class Stage(enum.Enum):
    QUEUE = "queue"
    LOOKUP = "lookup"
    ATTACH = "attach"
    PREFILL = "prefill"
    DECODE = "decode"


class Stopwatch:
    """Exactly one stage runs at any time; a stage may be entered again."""

    def __init__(self, now: float) -> None:
        self._stage = Stage.QUEUE
        self._since = now
        self._seconds = dict.fromkeys(Stage, 0.0)

    def enter(self, stage: Stage, now: float) -> None:
        """End the present stage and begin `stage`."""
        assert now >= self._since
        self._seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    @property
    def seconds(self) -> Mapping[Stage, float]:
        """Of each stage, up to the last `enter`."""
        return self._seconds

    def timing(self, now: float) -> Timing:
        """The stages so far, the present one included."""
        self.enter(self._stage, now)
        return Timing(*(1000.0 * self._seconds[stage] for stage in Stage))
