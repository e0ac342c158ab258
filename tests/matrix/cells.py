"""The cells of the matrix: everything that a match can be, for every kind of cache. Pure.

A cell is a way to be served from the cache: a sequence is stored, and then a request comes that
shares a part of it. `checkpoint_at` tokens of the sequence have a checkpoint, and an earlier one:

    exact          before   e = at        ├──────○───────────────┤●  the whole sequence again
                   at       e = at + 1    ├──────○───────────────●┤
                   after    e = at + 4    ├──────○───────────────●──┤
    prefix         at       e = at        ├──────○───────────────●  and a rest
    supersequence  any      ├──────○───────────────●─────┤·············  ends inside
    lcp            any      ├──────○───────────────●─────┤ and another rest

Every stored sequence ends with a checkpoint of its own, which is why a prefix is always at one.
The request comes three times; each time what was computed of it is stored.
"""

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.zoo import ZOO
from tests.support.zoo.rows import ROWS
from tests.support.zoo.window import WINDOW


class Match(enum.Enum):
    EXACT = "exact"
    PREFIX = "prefix"
    SUPERSEQUENCE = "supersequence"
    LCP = "lcp"


class Window(enum.Enum):
    """Where the checkpoint is, as compared with the length of windows."""

    BELOW = "below"
    AT = "at"
    ABOVE = "above"


class Reach(enum.Enum):
    """How far the match goes, as compared with the checkpoint."""

    BEFORE = "before"
    AT = "at"
    AFTER = "after"


class Rest(enum.Enum):
    """What is left to compute when everything that matches can be used."""

    ONE = "one token"
    SEVERAL = "several"


class Company(enum.Enum):
    ALONE = "alone"
    MIXED = "mixed batch"


CODECS = ("none", "q8", "turbo3")
# Nothing in them is rows or a window: no lossy codec applies, and asking for one is an error.
ONLY_RECURRENT = ("mamba", "mamba2", "rwkv7")
# Their cache is of a class that nobody but its model knows.
NOT_CACHED = ("deepseek_v41",)

# transformers, which mlx-lm reads every configuration with, refuses the names of its layers.
DOES_NOT_LOAD = ("gear",)
ARCHITECTURES = tuple(name for name in ZOO if name not in DOES_NOT_LOAD)

CHECKPOINT_AT: Mapping[Window, int] = {
    Window.BELOW: WINDOW - 12,
    Window.AT: WINDOW,
    Window.ABOVE: 2 * WINDOW + 9,
}
# Tokens between the checkpoint and the one before.
BETWEEN = 7
REPLY_TOKENS = 4
REST_TOKENS: Mapping[Rest, int] = {Rest.ONE: 1, Rest.SEVERAL: 9}
BEYOND = 3


@dataclass(frozen=True, slots=True)
class Cell:
    architecture: str
    codec: str
    match: Match
    window: Window
    reach: Reach
    rest: Rest
    company: Company

    @property
    def checkpointed(self) -> bool:
        return self.architecture not in ROWS

    def __str__(self) -> str:
        values = (self.match, self.window, self.reach, self.rest, self.company)
        return "/".join([self.architecture, self.codec, *(value.value for value in values)])


@dataclass(frozen=True, slots=True)
class Course:
    """What is stored, and what is asked then; lengths in tokens.

    The sequence is a prompt of `prompt`, whose messages end at `ends`, and a reply of `reply`; with
    none it is only warmed. The request is its first `shared` tokens and `other` different ones.
    """

    prompt: int
    ends: tuple[int, ...]
    reply: int
    shared: int
    other: int

    @property
    def sequence(self) -> int:
        return self.prompt + self.reply

    @property
    def request(self) -> int:
        return self.shared + self.other

    @property
    def matched(self) -> int:
        """Rows that can be used of a cache that can be cut anywhere."""
        return min(self.shared, self.request - 1)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return (*self.ends, self.prompt - 1, self.sequence)

    def cached(self, checkpointed: bool) -> int:
        """Rows that have to be used."""
        if not checkpointed:
            return self.matched
        return max((at for at in self.checkpoints if at <= self.matched), default=0)


def course(cell: Cell) -> Course:
    at = CHECKPOINT_AT[cell.window]
    earlier, rest = (at - BETWEEN,), REST_TOKENS[cell.rest]
    ends_there = Course(at - REPLY_TOKENS, (at - 2 * BETWEEN,), REPLY_TOKENS, at, 0)
    match cell.match, cell.reach:
        case Match.EXACT, Reach.BEFORE:
            return ends_there
        case Match.EXACT, Reach.AT:
            return Course(at + 1, earlier, 0, at + 1, 0)
        case Match.EXACT, Reach.AFTER:
            return Course(at + 1, earlier, BEYOND, at + 1 + BEYOND, 0)
        case Match.PREFIX, _:
            return Course(ends_there.prompt, ends_there.ends, REPLY_TOKENS, at, rest)
    matched = at + {Reach.BEFORE: -1, Reach.AT: 0, Reach.AFTER: BEYOND}[cell.reach]
    shared, other = (matched + 1, 0) if cell.match is Match.SUPERSEQUENCE else (matched, rest)
    return Course(at + 4 * BETWEEN, (*earlier, at), REPLY_TOKENS, shared, other)


AXES: Mapping[str, Callable[[str], tuple[Any, ...]]] = {
    "codec": lambda name: CODECS[:1] if name in (*ONLY_RECURRENT, *NOT_CACHED) else CODECS,
    "match": lambda _: tuple(Match),
    "window": lambda _: tuple(Window),
    "reach": lambda name: (Reach.AT,) if name in ROWS else tuple(Reach),
    "rest": lambda _: tuple(Rest),
    "company": lambda _: tuple(Company),
}


def cells(architecture: str) -> Iterator[Cell]:
    """All of an architecture."""
    for values in itertools.product(*(axis(architecture) for axis in AXES.values())):
        cell = Cell(architecture, *values)
        if _possible(cell):
            yield cell


def _possible(cell: Cell) -> bool:
    if cell.match is Match.PREFIX:
        return cell.reach is Reach.AT
    # What ends inside what is stored, or with it, leaves one token.
    return cell.match is Match.LCP or cell.rest is Rest.ONE


def all_cells() -> list[Cell]:
    return [cell for name in ARCHITECTURES for cell in cells(name)]
