"""The daemon's own look into its slabs, for a person or to tidy up. Calls never need one."""

import mmap
from collections.abc import Mapping

from cachestore import shm
from cachestore.extent import Extent
from cachestore.retirement import Slab


class Memory:
    """Slabs are mapped when they are needed, and as long as this or a view of them lives."""

    def __init__(self, slabs: Mapping[int, Slab]) -> None:
        self._slabs = slabs
        self._mapped: dict[int, mmap.mmap] = {}

    def view(self, extent: Extent) -> memoryview:
        """The bytes of an extent, to be read."""
        end = extent.offset + extent.length
        return memoryview(self._map(extent.slab_id)).toreadonly()[extent.offset : end]

    def move(self, source: Extent, target: Extent) -> None:
        """Copy all bytes of an extent to one of the same slab and length; they may overlap."""
        assert source.slab_id == target.slab_id
        assert source.length == target.length
        self._map(source.slab_id).move(target.offset, source.offset, source.length)

    def _map(self, slab_id: int) -> mmap.mmap:
        mapping = self._mapped.get(slab_id)
        if mapping is None:
            slab = self._slabs[slab_id]
            mapping = self._mapped[slab_id] = shm.map_slab(slab.fd, slab.size)
        return mapping
