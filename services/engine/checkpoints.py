"""Where a request takes checkpoints while its prompt is computed. Pure: no clock, no MLX.

A model with layers whose cache cannot be cut at any token goes on from a checkpoint alone: a copy
of that state at one exact position. So it is taken where other prompts are likely to part from
this one:

    ├ system prompt ┼ user ... user ┼ generation prompt ┤ reply ┤
                    ▲               ▲                 ▲         ▲
              end of the       end of the     one before    end of the reply
              first message    last one       the end       (writeback.py)

The one before the end is for the same prompt again, of which at least one token is computed.
Between them one is taken every `stride` tokens, for prompts that part anywhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# The cachestore takes 64 in one write; that of a short reply has one more, at the reply's end.
POSITIONS_MAX: Final = 63


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Of a chat's prompt, as numbers of tokens; empty and 0 for what is not known.

    `conversation_start` is the end of the first user message: what is common to conversations
    lies before it, and what one of them keeps lies behind it.
    """

    message_ends: tuple[int, ...] = ()
    conversation_start: int = 0


UNKNOWN: Final = Boundaries()


def planned(
    prompt_tokens: int, message_ends: Iterable[int], stride: int, *, whole: bool = False
) -> tuple[int, ...]:
    """Positions in ascending order, each in 1..prompt_tokens, POSITIONS_MAX at most.

    `whole`: the end of the prompt is one too, for whoever goes on from there. Of a prompt that is
    too long for every stride, every second one is taken, or every fourth, and so on: they are
    multiples of one another, so that prompts of different lengths share them.
    """
    assert prompt_tokens >= 1
    assert stride >= 1
    ends = {*message_ends, prompt_tokens - 1, prompt_tokens if whole else 0}
    fixed = sorted(end for end in ends if 0 < end <= prompt_tokens - (not whole))[-POSITIONS_MAX:]
    while prompt_tokens // stride > POSITIONS_MAX - len(fixed):
        stride *= 2
    return tuple(sorted({*fixed, *range(stride, prompt_tokens, stride)}))
