"""How many checkpoints a conversation keeps, and which ones leave when there are more."""

from collections.abc import Collection, Iterator, Sequence

from cachestore.node import Checkpoint, Record
from cachestore.tree import Walk


def deepest(positions: Sequence[int], end: int) -> int:
    """The last of ascending positions that is at most `end`; 0 when there is none."""
    return max((position for position in positions if position <= end), default=0)


def bounded(walk: Walk, conversation_start: int) -> list[list[Checkpoint]]:
    """Those among which a number is kept, for a sequence that `walk` has found whole.

                          system prompt        conversation_start
        the sequence   ├────────┬──────────────────────┼─────────┬───────┬─────┤
        checkpoints           first     shared ones           its own   its own
        an abandoned reply                                        └───────┴──┤ its own

    The first one is what others most likely share, and is not counted. Those up to where the
    conversation goes its own way are others' too, so that a long conversation cannot push them
    out, nor they it. When the beginning is not known (0), all of the sequence counts as shared,
    and branches count by themselves.
    """
    shared = walk.checkpoints()[1:]
    if not 0 < conversation_start <= walk.depth:
        return [shared]
    return [
        [checkpoint for checkpoint in shared if checkpoint.position <= conversation_start],
        list(beneath(*walk.place(conversation_start))),
    ]


def beneath(record: Record, offset: int) -> Iterator[Checkpoint]:
    """All behind the first `offset` tokens of a record's run, in any sequence."""
    pending = [(record, offset)]
    while pending:
        record, offset = pending.pop()
        yield from (each for at, each in record.checkpoints.items() if at > offset)
        pending += [(child, 0) for (fork, _), child in record.children.items() if fork >= offset]


def surplus(
    checkpoints: Collection[Checkpoint], kept: int, fresh: Collection[Checkpoint]
) -> list[Checkpoint]:
    """Those to drop so that at most `kept` stay, the least recently used first. Pinned and
    `fresh` ones stay in any case, even if those are more."""
    droppable = [each for each in checkpoints if each.idle and each not in fresh]
    droppable.sort(key=lambda each: each.last_used)
    return droppable[: max(0, len(checkpoints) - kept)]
