"""How many checkpoints a conversation keeps, and which ones leave when there are more."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from cachestore.node import Checkpoint, Record
from cachestore.tree import Walk

# What was served or committed on another branch of a conversation not longer ago than this is taken
# to be in use: by a request that decodes, or by a client that is about to go on from there.
BRANCH_IDLE_SECONDS = 60.0


def deepest(positions: Sequence[int], end: int) -> int:
    """The last of ascending positions that is at most `end`; 0 when there is none."""
    return max((position for position in positions if position <= end), default=0)


@dataclass(frozen=True, slots=True)
class Group:
    """Checkpoints of which a number is kept. Those used less than `idle_seconds` ago are not among
    them: they stay."""

    checkpoints: Collection[Checkpoint]
    idle_seconds: float = 0.0


def bounded(walk: Walk, conversation_start: int) -> list[Group]:
    """Those among which a number is kept, for a sequence that `walk` has found whole.

                          system prompt        conversation_start
        the sequence   ├────────┬──────────────────────┼─────────┬───────┬─────┤
        checkpoints           first     shared ones           its own   its own
        another branch                                        └───────┴──┤ of branches

    The first one is what others most likely share, and is not counted. Those up to where the
    conversation goes its own way are others' too, so that a long conversation cannot push them
    out, nor they it. When the beginning is not known (0), all of the sequence counts as shared,
    and branches count by themselves.

    On the sequence any may leave: its rows stay, for there is a checkpoint behind them. The last
    one of another branch takes rows along. It may be of a reply that was abandoned, or of a
    request that is still decoding and will write behind them, which only time can tell.
    """
    path = walk.checkpoints()
    if not 0 < conversation_start <= walk.depth:
        return [Group(path[1:])]
    behind = beneath(*walk.place(conversation_start))
    return [
        Group([each for each in path[1:] if each.position <= conversation_start]),
        Group([each for each in path if each.position > conversation_start]),
        Group([each for each in behind if each not in path], BRANCH_IDLE_SECONDS),
    ]


def beneath(record: Record, offset: int) -> Iterator[Checkpoint]:
    """All behind the first `offset` tokens of a record's run, in any sequence."""
    pending = [(record, offset)]
    while pending:
        record, offset = pending.pop()
        yield from (each for at, each in record.checkpoints.items() if at > offset)
        pending += [(child, 0) for (fork, _), child in record.children.items() if fork >= offset]


def surplus(
    group: Group, kept: int, staying: Collection[Checkpoint], now: float
) -> list[Checkpoint]:
    """Those to drop so that at most `kept` stay, the least recently used first. Pinned ones stay
    and do not count; `staying` ones count, and stay even if those are more."""
    counted = [
        each for each in group.checkpoints if each.idle and now - each.used_at >= group.idle_seconds
    ]
    droppable = sorted(
        (each for each in counted if each not in staying), key=lambda each: each.last_used
    )
    return droppable[: max(0, len(counted) - kept)]
