"""When a row's computed tokens leave the batch for the cachestore. On the worker thread.

Rows of plain layers do not change any more once they are computed. So they are packed while the
request decodes, a bounded piece after each step: packing all of a long prompt at once would stall
every stream. A prompt is a write of its own, for its end is where another reply to it begins.

    prompt, after its first token        reply, in whole pieces        the rest, when it is over
    ├── piece ──┼── piece ──┼─ piece ─┤  ├── piece ──┼── piece ──┤  ├──┤
                                 write                              write

Other layers are what they are at one position only: the step that reaches a checkpoint is followed
by a copy of their state, before the next one, and so is the last step of a reply, unless it is a
few tokens long. Copies wait in the row for the write of its rows. Rows behind the last checkpoint
are not stored at all.

A row that is cancelled ends where it stands, in its prompt or its reply, as others do at the end of
theirs. It leaves the batch at once; what is not yet packed of it is copied first.

    prompt                               reply
    ├───────●──────────────────●────●─┤──────────────────────────────────────────────────────●
            └ copies, with the rows ┘                        the last one, with all rows before
"""

import logging
from collections.abc import Collection, Sequence

from engine.batch import Batch, Reached
from engine.checkpoints import is_apart
from engine.kv.history import Rows
from engine.kv.kinds import NotCacheable
from engine.prefix import Prefix
from engine.rows import Aside, Row, State
from engine.storing import Tail

log = logging.getLogger(__name__)

# Rows of a piece, which takes about 10 ms at 8 bits for SmolLM2 on a CPU. Of shorter pieces so
# many are packed between two steps that they come to fewer than twice that.
PIECE_ROWS = 256


class Writeback:
    """Packs rows and hands them to the writer; the state is in each row."""

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix

    def begin(self, row: Row) -> None:
        """Its first rows are cached, or none are."""
        row.packed_to = row.cached
        row.prompt_rows = row.cached if self._prefix.checkpointed else len(row.request.tokens)

    def step(self, batch: Batch, rows: Collection[Row], reached: Sequence[Reached] = ()) -> None:
        """After each step, with all rows that are in the batch or aside: take the checkpoints that
        are due, and pack pieces, of the first rows that have some, until they are as much as a
        whole one."""
        self._take_checkpoints(batch, rows, reached)
        left = PIECE_ROWS
        for row in rows:
            while left > 0 and (packed := self._pack(batch, row)):
                left -= packed

    def cancelled(self, batch: Batch, row: Row, rows: Collection[Row]) -> None:
        """Settle that a row stores what it has computed, so that asking again is a hit, and set
        aside what is yet to be packed of that, if anything is. It is one of `rows`, as in `step`.
        """
        assert row.uid is not None
        if row.rows_final is None:
            self._end(batch, row, rows)
        if is_packed(row):
            return
        if not self._prefix.writes:
            self._give_up(row)
            return
        first, end = row.packed_to, _held(batch, row)
        try:
            leaves = batch.rows_apart(row.uid, self._prefix.layout, first, end)
        except Exception:
            log.exception("rows could not be set aside; they are not stored")
            self._give_up(row)
            return
        row.aside = Aside(first, leaves)

    def _take_checkpoints(
        self, batch: Batch, rows: Collection[Row], reached: Sequence[Reached]
    ) -> None:
        unsettled = {row.uid: row for row in rows if row.rows_final is None}
        for each in reached:
            row = unsettled.get(each.uid)
            if row is None or each.position not in row.planned:
                continue
            self._take_checkpoint(batch, row, each.position, rows)
            if each.position == row.planned[-1] and not row.checkpoints:
                self._break_promise(row)  # there will be no write of this prompt
        for row in unsettled.values():
            if row.state is State.LEAVING:
                self._end(batch, row, rows)

    def _take_checkpoint(
        self, batch: Batch, row: Row, position: int, rows: Collection[Row]
    ) -> None:
        """Of a row that is at this position now, unless it was taken already. Where `rows` keep
        too much the row's last one leaves for it, but each row may keep one."""
        assert row.uid is not None
        if position <= _taken_to(row) or not self._prefix.writes:
            return
        try:
            snapshot = batch.snapshot(row.uid, self._prefix.layout)
            packed = self._prefix.pack_checkpoint(snapshot, position)
        except Exception as error:
            said = "no checkpoint at %d, and nothing behind the one before is stored: %s"
            log.warning(said, position, error, exc_info=not isinstance(error, NotCacheable))
            return
        # Anew for each: several rows may reach one in the same step.
        kept_bytes = sum(each.nbytes for other in rows for each in other.checkpoints)
        if row.checkpoints and not self._prefix.has_room(kept_bytes):
            row.checkpoints.pop()  # the deepest is worth most
        row.checkpoints.append(packed)
        prompt_tokens = len(row.request.tokens)
        among = [each.position for each in row.checkpoints if each.position <= prompt_tokens]
        row.prompt_rows = among[-1] if among else _written_to(row)

    def _end(self, batch: Batch, row: Row, rows: Collection[Row]) -> None:
        """Settle how much a row stores at last: what is computed of it, or that up to its last
        checkpoint."""
        end, written = _held(batch, row), _written_to(row)
        if self._prefix.checkpointed and end > written:
            if is_apart(end, _taken_to(row)):
                self._take_checkpoint(batch, row, end, rows)
            if not row.checkpoints:
                if is_apart(end, written):
                    self._prefix.give_up(row.found)
                _forget(row)
                return
            end = row.checkpoints[-1].position
        row.rows_final = end
        if row.packed and end <= row.packed_to:
            self._hand_over(row, end)

    def _pack(self, batch: Batch, row: Row) -> int:
        """Pack the next piece of a row, and hand over what ends with it; its rows, 0 for none.

        Without a cachestore nothing is packed now, and a later call takes these rows too.
        """
        if not self._prefix.writes:
            return 0
        first, end = row.packed_to, self._piece_end(batch, row)
        if end is None:
            return 0
        if not row.packed:
            row.path_rows = _path_rows(row, _held(batch, row), end)
        try:
            rows = self._rows(batch, row, first, end)
            row.packed += self._prefix.pack(row.path_rows, rows, range(first, end))
        except Exception:
            log.exception("rows could not be packed; they are not stored")
            self._give_up(row)
            return 0
        row.packed_to = end
        if end in (row.prompt_rows, row.rows_final):
            self._hand_over(row, end)
        return end - first

    def _rows(self, batch: Batch, row: Row, first: int, end: int) -> list[Rows]:
        """Of each leaf the rows [first, end); lazy, until the next step."""
        if row.aside is not None:
            return row.aside.rows(first, end)
        assert row.uid is not None
        return batch.rows(row.uid, self._prefix.layout, first, end)

    def _hand_over(self, row: Row, end: int) -> None:
        """Give the packed rows before `end` to the writer, with the checkpoints among them."""
        taken = [each for each in row.checkpoints if each.position <= end]
        start = row.request.boundaries.conversation_start
        tail = Tail(row.tokens[:end], tuple(row.packed), tuple(taken), start)
        self._prefix.write(tail, row.found, row.id if row.request.warm else None)
        row.packed, row.checkpoints = [], row.checkpoints[len(taken) :]
        if end != row.rows_final and end < max(row.planned, default=0):
            self._break_promise(row)

    def _break_promise(self, row: Row) -> None:
        """The deepest checkpoint that was announced will not come, or not before the reply is
        over: whoever waits for it must not wait so long."""
        if row.found is not None:
            self._prefix.give_up(row.found)

    def _give_up(self, row: Row) -> None:
        """Nothing more of a row is stored, though it was to be."""
        self._prefix.give_up(row.found)
        _forget(row)

    def _piece_end(self, batch: Batch, row: Row) -> int | None:
        """Where the next piece of a row ends, if it has one now."""
        held = _held(batch, row)
        if row.rows_final is None and held < len(row.request.tokens):
            return None  # still computing
        whole = row.packed_to + PIECE_ROWS
        if row.packed_to < min(row.prompt_rows, held):
            return min(whole, row.prompt_rows, held)
        if row.rows_final is not None:
            return min(whole, held) if row.packed_to < held else None
        # A reply in its beginning may still end as a path of another codec.
        return whole if whole <= held and self._prefix.is_settled(held) else None


def is_packed(row: Row) -> bool:
    """Whether a row whose reply is over may leave the batch."""
    assert row.rows_final is not None
    return row.packed_to >= row.rows_final


def _held(batch: Batch, row: Row) -> int:
    """Rows that it stores at last, or that the batch holds of it so far."""
    if row.rows_final is not None:
        return row.rows_final
    assert row.uid is not None
    return batch.held(row.uid)


def _written_to(row: Row) -> int:
    """Rows that are cached, or with the writer."""
    return row.packed[0].first_token if row.packed else row.packed_to


def _forget(row: Row) -> None:
    """What is not yet with the writer never will be."""
    row.packed_to = row.rows_final = _written_to(row)
    row.packed, row.checkpoints = [], []


def _taken_to(row: Row) -> int:
    """The position of the last checkpoint that is cached, or was taken; 0 before the first."""
    return row.checkpoints[-1].position if row.checkpoints else _written_to(row)


def _path_rows(row: Row, held: int, end: int) -> int:
    """Length of the path that a piece will be committed with, as far as the codec cares."""
    if end > row.prompt_rows:
        return held
    return row.prompt_rows if row.rows_final is None else min(row.prompt_rows, held)
