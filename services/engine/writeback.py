"""When a row's computed tokens leave the batch for the cachestore. On the worker thread.

Rows of plain layers do not change any more once they are computed. So they are packed while the
request decodes, a bounded piece after each step: packing all of a long prompt at once would stall
every stream. A prompt is a write of its own, for its end is where another reply to it begins.

    prompt, after its first token        reply, in whole pieces        the rest, when it is over
    ├── piece ──┼── piece ──┼─ piece ─┤  ├── piece ──┼── piece ──┤  ├──┤
                                 write                              write
"""

import logging
from collections.abc import Iterable

from engine.batch import Batch
from engine.prefix import Prefix
from engine.rows import Row

log = logging.getLogger(__name__)

# Rows of a piece, which takes about 10 ms at 8 bits for SmolLM2 on a CPU. Of shorter pieces so
# many are packed between two steps that they come to fewer than twice that.
PIECE_ROWS = 256
# What a cancelled request may still store; it must leave at once.
CANCELLED_ROWS_MAX = 1024


class Writeback:
    """Packs rows and hands them to the writer; the state is in each row."""

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix

    def step(self, batch: Batch, rows: Iterable[Row]) -> None:
        """Pack pieces, of the first rows that have some, until they are as much as a whole one."""
        left = PIECE_ROWS
        for row in rows:
            while left > 0 and (packed := self._pack(batch, row)):
                left -= packed

    def all(self, batch: Batch, row: Row) -> None:
        """Pack everything that a row has to store."""
        while self._pack(batch, row):
            pass

    def cancelled(self, batch: Batch, row: Row) -> None:
        """Pack some of what a cancelled row has computed, so that asking again is a hit."""
        assert row.uid is not None
        row.rows_final = min(batch.held(row.uid), row.packed_to + CANCELLED_ROWS_MAX)
        self.all(batch, row)
        if not is_packed(row):
            self._prefix.give_up(row.found)

    def _pack(self, batch: Batch, row: Row) -> int:
        """Pack the next piece of a row, and hand over what ends with it; its rows, 0 for none.

        Without a cachestore nothing is packed now, and a later call takes these rows too.
        """
        if row.uid is None or not self._prefix.writes:
            return 0
        first, end = row.packed_to, self._piece_end(batch, row)
        if end is None:
            return 0
        if not row.packed:
            row.path_rows = _path_rows(row, batch.held(row.uid), end)
        try:
            rows = batch.rows(row.uid, self._prefix.layout, first, end)
            row.packed += self._prefix.pack(row.path_rows, rows, range(first, end))
        except Exception:
            log.exception("rows could not be packed; they are not stored")
            self._prefix.give_up(row.found)
            row.packed_to = row.packed[0].first_token if row.packed else first
            row.packed, row.rows_final = [], row.packed_to
            return 0
        row.packed_to = end
        if end in (len(row.request.tokens), row.rows_final):
            report = row.id if row.request.warm else None
            self._prefix.write(row.tokens[:end], row.packed, row.found, report)
            row.packed = []
        return end - first

    def _piece_end(self, batch: Batch, row: Row) -> int | None:
        """Where the next piece of a row ends, if it has one now."""
        assert row.uid is not None
        prompt = len(row.request.tokens)
        held = batch.held(row.uid) if row.rows_final is None else row.rows_final
        if row.rows_final is None and held < prompt:
            return None  # still computing
        whole = row.packed_to + PIECE_ROWS
        if row.packed_to < min(prompt, held):
            return min(whole, prompt, held)
        if row.rows_final is not None:
            return min(whole, held) if row.packed_to < held else None
        # A reply in its beginning may still end as a path of another codec.
        return whole if whole <= held and self._prefix.is_settled(held) else None


def is_packed(row: Row) -> bool:
    """Whether a row whose reply is over may leave the batch."""
    assert row.rows_final is not None
    return row.packed_to >= row.rows_final


def _path_rows(row: Row, held: int, end: int) -> int:
    """Length of the path that a piece will be committed with, as far as the codec cares."""
    prompt = len(row.request.tokens)
    if end > prompt:
        return held if row.rows_final is None else row.rows_final
    return prompt if row.rows_final is None else min(prompt, row.rows_final)
