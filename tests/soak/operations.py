"""What the clients do: drawn from the seed and the number of the operation, so that a run can be
made again, apart from what happens at the same time."""

import enum
import math
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

TOKENS = 256
# Segments of a tree of prefixes: how many of each depth begin alike, and their longest. With the
# replies that is more than the store holds.
BRANCHES = ((4, 200), (4, 120), (6, 60))
TAIL_TOKENS_MAX = 40
# A prompt that comes once, longer than what others share.
SCAN_TOKENS = (400, 1200)
CONVERSATION_TOKENS_MAX = 900

PLACES = ("store", "one", "two")


class Kind(enum.Enum):
    GENERATE = "generate"
    CONTINUE = "continue a conversation"
    WARM = "warm"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    DISCONNECT = "disconnect"
    CROWD = "crowd"
    STATS = "stats"
    EVICT = "evict"
    FLUSH = "flush"
    PIN = "pin"
    UNPIN = "unpin"
    VERIFY = "verify"
    RESTART = "restart"


WEIGHTS = {
    Kind.GENERATE: 400,
    Kind.CONTINUE: 160,
    Kind.WARM: 60,
    Kind.CANCEL: 110,
    Kind.DEADLINE: 100,
    Kind.DISCONNECT: 60,
    Kind.CROWD: 50,
    Kind.STATS: 30,
    Kind.EVICT: 10,
    Kind.PIN: 8,
    Kind.UNPIN: 8,
    Kind.VERIFY: 3,
    Kind.FLUSH: 1,
}


@dataclass(frozen=True, slots=True)
class Operation:
    index: int
    kind: Kind
    # Its own source of everything else that is random.
    draw: random.Random


@dataclass(frozen=True, slots=True)
class Restart:
    """Of the daemon at this place, by this signal."""

    place: str
    number: signal.Signals


def operation(seed: int, index: int, restarts: dict[int, Restart]) -> Operation:
    draw = random.Random(f"{seed}/{index}")
    if index in restarts:
        return Operation(index, Kind.RESTART, draw)
    (kind,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
    return Operation(index, kind, draw)


def restarts(seed: int, operations: int) -> dict[int, Restart]:
    """Three acts, so that everything dies, and everything also lives long beside what dies:
    all daemons die; the second engine alone; the store alone. At least one death each in the
    first."""
    draw = random.Random(f"{seed}/restarts")
    acts = (
        (0.02, 0.4, PLACES, 2500),
        (0.4, 0.7, ("two",), 1000),
        (0.7, 0.98, ("store",), 2000),
    )
    found: dict[int, Restart] = {}
    for begin, end, places, operations_each in acts:
        deaths = [
            Restart(place, number)
            for place in places
            for number, least in ((signal.SIGKILL, begin < 0.4), (signal.SIGTERM, 0))
            for _ in range(max(least, operations // operations_each))
        ]
        span = range(math.ceil(begin * operations), math.floor(end * operations))
        found |= dict(zip(draw.sample(span, len(deaths)), deaths, strict=True))
    return found


def prompt(seed: int, draw: random.Random) -> list[int]:
    """Often a path in the tree of prefixes with an end of its own, sometimes cut anywhere,
    seldom something long that nobody has seen."""
    if draw.random() < 0.03:
        return tail(draw, draw.randint(*SCAN_TOKENS))
    tokens: list[int] = []
    path = str(seed)
    for branches, length in BRANCHES[: draw.choice((1, 2, 3, 3, 3))]:
        path += f"/{min(draw.randrange(branches), draw.randrange(branches))}"
        segment = random.Random(path)
        tokens += tail(segment, segment.randint(length // 2, length))
    if draw.random() < 0.2:
        return tokens[: draw.randint(1, len(tokens))]
    return tokens + tail(draw, draw.randint(0, TAIL_TOKENS_MAX))


def next_turn(history: Sequence[int], draw: random.Random) -> list[int]:
    return [*history, *tail(draw, draw.randint(1, TAIL_TOKENS_MAX))]


def tail(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(TOKENS) for _ in range(count)]


def reply_tokens(draw: random.Random) -> int:
    return draw.choice((4, 4, 6, 6, 8, 8, 12, 40))
