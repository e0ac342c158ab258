"""Where bytes lie: what the daemon and its clients say of slabs to each other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A piece of a slab; `offset` and `length` are multiples of 256 bytes.

    `generation` counts allocations of the whole arena, so that the same bytes, allocated again,
    are another extent.
    """

    slab_id: int
    offset: int
    length: int
    generation: int
