"""What the layers of a loaded model keep, learnt from one small forward pass."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ChunkedKVCache, ConcatenateKVCache

from engine.kv.encoding import PartShape
from engine.kv.history import JoiningKVCache, QuantizedKVCache
from engine.kv.kinds import (
    ConcatenatedKV,
    Kind,
    NotCacheable,
    PlainKV,
    RowKind,
    StateKind,
    leaves,
    members,
)
from engine.kv.live import LiveCaches
from engine.kv.recurrent import RecurrentCache
from engine.kv.rotating import WindowKVCache
from engine.kv.states import Chunk, Recurrent, Window

# By exact class: a subclass may rotate or share its rows. What learns a kind from a cache of one
# request that has been fed.
ROW_KINDS: Final[Mapping[type, Callable[[Any], RowKind]]] = {
    JoiningKVCache: PlainKV.of,
    QuantizedKVCache: PlainKV.of,
    ConcatenateKVCache: ConcatenatedKV.of,
}
STATE_KINDS: Final[Mapping[type, Callable[[Any], StateKind]]] = {
    WindowKVCache: Window.of,
    ChunkedKVCache: Chunk.of,
    RecurrentCache: Recurrent.of,
}

# As many as the convolutions of recurrent layers look back, and more.
_PROBE_TOKENS: Final = 16

K_co = TypeVar("K_co", bound=Kind, covariant=True)


@dataclass(frozen=True, slots=True)
class LayerGroup(Generic[K_co]):
    """Layers of one kind and one geometry, stored together. `layers` are numbers of leaves: layer
    caches, those in a CacheList counted one by one."""

    kind: K_co
    layers: tuple[int, ...]

    @property
    def parts(self) -> tuple[PartShape, ...]:
        return self.kind.parts


RowGroup = LayerGroup[RowKind]
StateGroup = LayerGroup[StateKind]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups that together make up all leaves of a model.

    `lists` has for each of the model's caches how many leaves it is a CacheList of, None for one
    that is a leaf itself.
    """

    groups: tuple[RowGroup, ...]
    states: tuple[StateGroup, ...] = ()
    lists: tuple[int | None, ...] = ()

    @property
    def layers(self) -> int:
        """Leaves."""
        return sum(len(group.layers) for group in self.all)

    @property
    def all(self) -> tuple[RowGroup | StateGroup, ...]:
        return (*self.groups, *self.states)

    @property
    def checkpointed(self) -> bool:
        """Whether a match is of use only where the state of its layers is held."""
        return bool(self.states)

    def nest(self, caches: Sequence[Any]) -> list[Any]:
        """The model's caches, of its leaves' caches."""
        if not self.lists:
            return list(caches)
        left: Iterator[Any] = iter(caches)
        return [
            next(left) if count is None else CacheList(*(next(left) for _ in range(count)))  # type: ignore[no-untyped-call]
            for count in self.lists
        ]

    def describe(self) -> dict[str, Any]:
        """Everything that identity has to cover, as plain values in a fixed order."""
        return {
            "groups": [
                {
                    "kind": group.kind.name,
                    "layers": [*group.layers],
                    "parts": [
                        [p.name, p.heads, p.width, p.dtype, p.live.header] for p in group.parts
                    ],
                    **group.kind.describe(),
                }
                for group in self.all
            ],
            "lists": [*self.lists],
        }

    def notes(self) -> list[str]:
        """For each kind of layer a line that says how it is cached."""
        lines: Counter[str] = Counter()
        for groups, how in ((self.groups, "rows"), (self.states, "checkpoints")):
            for group in groups:
                lines[f"{group.kind}: {how}"] += len(group.layers)
        return [f"{count} x {line}" for line, count in lines.items()]


def probe(live: LiveCaches) -> CacheLayout:
    """Learns the layout of a model's caches; runs on the MLX thread.

    NotCacheable when any layer is of a kind that the store cannot hold.
    """
    model, caches = live.model, live.fresh()
    refuse_unknown_kinds(caches)
    held = leaves(caches)
    mx.eval(model(mx.array([[0] * _PROBE_TOKENS]), cache=caches), [leaf.state for leaf in held])
    lists = [len(members(c)) if isinstance(c, CacheList) else None for c in caches]
    layout = CacheLayout(_groups(held, ROW_KINDS), _groups(held, STATE_KINDS), tuple(lists))
    if any(getattr(leaf, "offset", _PROBE_TOKENS) != _PROBE_TOKENS for leaf in held):
        raise NotCacheable("a layer keeps another number of rows than tokens were fed")
    return layout


def _groups(
    held: Sequence[Any], kinds: Mapping[type, Callable[[Any], K_co]]
) -> tuple[LayerGroup[K_co], ...]:
    """Leaves of these kinds that are alike."""
    groups: dict[K_co, list[int]] = {}
    for number, leaf in enumerate(held):
        if type(leaf) in kinds:
            groups.setdefault(kinds[type(leaf)](leaf), []).append(number)
    return tuple(LayerGroup(kind, tuple(layers)) for kind, layers in groups.items())


def refuse_unknown_kinds(caches: Sequence[Any]) -> None:
    """Raises NotCacheable that names the kinds of layers that have no entry above."""
    held = leaves(caches)
    if not held:
        raise NotCacheable("the model keeps no cache")
    unknown = Counter(
        type(leaf).__name__ for leaf in held if type(leaf) not in {**ROW_KINDS, **STATE_KINDS}
    )
    if unknown:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(unknown.items()))
        raise NotCacheable(f"kinds of layers that are not cached: {kinds} (of {len(held)})")
