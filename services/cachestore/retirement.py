"""Slabs that are no longer needed, until nobody maps them any more."""

import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from cachestore.store import Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slab:
    """Shared memory that the daemon holds; the descriptor stays open as long as it does."""

    fd: int
    size: int


class Retirement:
    """Knows which sessions were given which slab, and may still map it.

        in use ── retire ─▶ retiring ── the last session says that it is unmapped, or ends ─▶ gone

    A retiring slab is given to nobody. Its memory lives as long as anybody maps it, so it stays
    inside the budget until then; when it is gone its descriptor is closed.
    """

    def __init__(self, store: Store, slabs: MutableMapping[int, Slab]) -> None:
        self._store = store
        self._slabs = slabs
        self._holders: dict[int, set[int]] = {}
        self._retiring: set[int] = set()

    def give(self, session: int, slab_id: int) -> Slab | None:
        """The slab that a session is about to map; None when there is none of that id."""
        if slab_id not in self._slabs or slab_id in self._retiring:
            return None
        self._holders.setdefault(slab_id, set()).add(session)
        return self._slabs[slab_id]

    def retire(self) -> None:
        """Retire all slabs but one of those in which nothing lies."""
        for slab_id in self._store.retire_slabs():
            _log.info("slab %d is no longer needed", slab_id)
            self._retiring.add(slab_id)
            self._end_if_unmapped(slab_id)

    def held_by(self, session: int) -> list[int]:
        """Retiring slabs that the session may still map."""
        return [s for s in sorted(self._retiring) if session in self._holders.get(s, ())]

    def unmapped(self, session: int, slab_id: int) -> None:
        """The session's word that it maps a slab no longer. It may ask for it again."""
        holders = self._holders.get(slab_id, set())
        holders.discard(session)
        if not holders:
            self._holders.pop(slab_id, None)
        if slab_id in self._retiring:
            self._end_if_unmapped(slab_id)

    def session_ended(self, session: int) -> None:
        for slab_id in [s for s, holders in self._holders.items() if session in holders]:
            self.unmapped(session, slab_id)

    def _end_if_unmapped(self, slab_id: int) -> None:
        if slab_id in self._holders:
            return
        self._retiring.remove(slab_id)
        self._store.remove_slab(slab_id)
        os.close(self._slabs.pop(slab_id).fd)
        _log.info("slab %d is gone", slab_id)
