"""Who prefills next. Pure: no clock, no MLX, no threads.

Short rests, which nearly cached prompts have too, go before long ones, so that nobody waits
behind a long prompt for a reply of a moment. Waiting counts against length, so that a long
prompt is never overtaken for ever.

    queue ──admit──▶ prefilling (at most one long rest, short ones beside it) ──▶ decoding
"""

from dataclasses import dataclass

# One second of waiting outweighs this many tokens of rest.
AGING_TOKENS_PER_SECOND = 500.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue: `rest` is its prompt tokens that are not cached, at least 1."""

    request_id: int
    rest: int
    since: float


@dataclass(frozen=True, slots=True)
class Load:
    """What runs now: rests still to prefill, and rows that decode."""

    prefilling: tuple[int, ...]
    decoding: int


class Scheduler:
    """The queue and its order. Owned by the worker thread.

    `rows_max` bounds rows in the batch, prefilling ones included; `share_prefill` says whether
    prompts may prefill beside each other (the model's self-check decides).
    """

    def __init__(self, rows_max: int, share_prefill: bool, long_rest: int) -> None:
        assert rows_max >= 1
        assert long_rest >= 1
        self._rows_max = rows_max
        self._share_prefill = share_prefill
        self._long_rest = long_rest
        self._waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting) -> None:
        assert waiting.rest >= 1
        assert waiting.request_id not in self._waiting
        self._waiting[waiting.request_id] = waiting

    def remove(self, request_id: int) -> bool:
        """Forget a request; False when it is not in the queue."""
        return self._waiting.pop(request_id, None) is not None

    def admit(self, load: Load, now: float) -> list[int]:
        """Take the requests that may start now out of the queue, in order of their start."""
        free = self._rows_max - len(load.prefilling) - load.decoding
        if free <= 0 or not self._waiting:
            return []
        long_running = any(rest > self._long_rest for rest in load.prefilling)
        slots = free if self._share_prefill else min(free, 1 - len(load.prefilling))
        admitted: list[int] = []
        for waiting in sorted(self._waiting.values(), key=lambda w: self._rank(w, now)):
            if len(admitted) >= slots:
                break
            if waiting.rest > self._long_rest:
                if long_running:
                    continue
                long_running = True
            admitted.append(waiting.request_id)
        for request_id in admitted:
            del self._waiting[request_id]
        return admitted

    @staticmethod
    def _rank(waiting: Waiting, now: float) -> tuple[float, float, int]:
        aged = waiting.rest - (now - waiting.since) * AGING_TOKENS_PER_SECOND
        return aged, waiting.since, waiting.request_id
