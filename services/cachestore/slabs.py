"""Slabs as a client maps them."""

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence

from cachestore import handover
from cachestore.extent import Extent


class SlabError(Exception):
    """A slab that cannot be had, or bytes that are not in it."""


class Slabs:
    """Maps slabs of a session when they are needed. Any thread may call.

    A view keeps its slab mapped. Once a slab is let go of, by `retire` or `close`, it is unmapped
    with its last view, and the daemon is told.
    """

    def __init__(self, session: handover.Session) -> None:
        self._session = session
        self._mapped: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._unmapped: deque[int] = deque()
        self._closed = False

    @property
    def bytes_mapped(self) -> int:
        return sum(len(slab) for slab in tuple(self._mapped.values()))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._mapped = {}

    def view(self, extent: Extent) -> memoryview:
        """Raises SlabError."""
        slab = self.map(extent.slab_id)
        end = extent.offset + extent.length
        if end > len(slab):
            raise SlabError(
                f"[{extent.offset}, +{extent.length}) is outside of slab {extent.slab_id}"
            )
        return memoryview(slab)[extent.offset : end]

    def map(self, slab_id: int) -> mmap.mmap:
        """All of a slab. Raises SlabError."""
        with self._lock:
            if self._closed:
                raise SlabError("the client is closed")
            slab = self._mapped.get(slab_id)
            if slab is None:
                try:
                    slab = self._session.fetch(slab_id)
                except handover.HandoverError as error:
                    raise SlabError(f"slab {slab_id}: {error}") from error
                self._mapped[slab_id] = slab
                # Appending is all that may happen in a finalizer, which runs anywhere.
                weakref.finalize(slab, self._unmapped.append, slab_id).atexit = False
            return slab

    def retire(self, slab_ids: Sequence[int]) -> None:
        """Lets go of slabs, and tells the daemon of those whose last view is gone."""
        if slab_ids:
            with self._lock:
                for slab_id in slab_ids:
                    self._mapped.pop(slab_id, None)
        while self._unmapped:
            try:
                self._session.say_unmapped(self._unmapped.popleft())
            except (IndexError, handover.HandoverError):
                return  # another thread has just told, or there is nobody to be told
