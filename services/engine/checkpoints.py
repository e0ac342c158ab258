"""Where a request takes checkpoints while its prompt is computed. Pure: no clock, no MLX.

A model with layers whose cache cannot be cut at any token goes on from a checkpoint alone: a copy
of that state at one exact position. So it is taken where other prompts are likely to part from
this one:

    ├ system prompt ┼ user ... user, generation prompt ┤ reply ┤
                    ▲               ▲                ▲         ▲
              end of the       where the next     one before  end of the reply
              first message    turn parts         the end     (writeback.py)

The one before the end is for the same prompt again, of which at least one token is computed, and
as a rule it serves the next turn, too. Between them one is taken every `stride` tokens, for prompts
that part anywhere. And the cachestore, which sees where a prompt does part from others, may ask
for one there (PARTING_DISTANCE).

Of those that lie close together the first one is taken: whoever parts behind it computes a few
tokens more, which takes hardly longer than the one token that each request computes. The last one
would be of no use to whom it lies too far for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from engine import config

# The cachestore takes 64 in one write; that of a short reply has one more, at the reply's end, and
# one may be where the prompt parts from others.
POSITIONS_MAX: Final = 62
# A copy of a state may have tens of MiB, and the prompt stops for it: as long as some tens of
# tokens take on a GPU, where a forward pass of so few reads the same weights as one of a single
# token.
TOKENS_APART_MIN: Final = 32
# Where prompts part unforeseen one is taken only if it saves the next one so many tokens: who has
# parted there once may be alone with that.
PARTING_DISTANCE: Final = config.CHECKPOINT_STRIDE_MIN


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Of a chat's prompt, as numbers of tokens; empty and 0 for what is not known.

    `partings`: where other chats are expected to part from it. `conversation_start` is where the
    first reply begins: what is common to conversations lies before it, and what one of them keeps
    lies behind it.
    """

    partings: tuple[int, ...] = ()
    conversation_start: int = 0


UNKNOWN: Final = Boundaries()


def is_apart(position: int, before: int) -> bool:
    """Whether a checkpoint is worth its copy where the one before, or the beginning, is there."""
    return position - before >= TOKENS_APART_MIN


def planned(
    prompt_tokens: int, partings: Iterable[int], stride: int, *, whole: bool = False
) -> tuple[int, ...]:
    """Positions in ascending order, each in 1..prompt_tokens, POSITIONS_MAX at most.

    `whole`: the end of the prompt is one in any case, for whoever goes on from there. Of a prompt
    that is too long for every stride, every second one is taken, or every fourth, and so on: they
    are multiples of one another, so that prompts of different lengths share them. A prompt that is
    shorter than checkpoints are apart has one nevertheless.
    """
    assert prompt_tokens >= 1
    assert stride >= 1
    last, most = prompt_tokens - 1, POSITIONS_MAX - whole
    fixed = sorted({at for at in (*partings, last) if 0 < at <= last})[-most:]
    while prompt_tokens // stride > most - len(fixed):
        stride *= 2
    taken = [0]
    for position in sorted({*fixed, *range(stride, prompt_tokens, stride)}):
        if is_apart(position, taken[-1]):
            taken.append(position)
    positions = taken[1:] or fixed[-1:]
    return (*positions, prompt_tokens) if whole else tuple(positions)
