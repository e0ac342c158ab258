"""What the layers of a loaded model keep for each token, learnt from one small forward pass."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.kv.encoding import PartShape
from engine.kv.kinds import KINDS, NotCacheable
from engine.kv.live import LiveCaches


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers of one kind and one geometry, stored together."""

    kind: str
    first_layer: int
    layers: int
    parts: tuple[PartShape, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups that together make up all layers of a model, in order."""

    groups: tuple[LayerGroup, ...]

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    def describe(self) -> dict[str, Any]:
        """Everything that identity has to cover, as plain values in a fixed order."""
        return {
            "groups": [
                {
                    "kind": group.kind,
                    "first_layer": group.first_layer,
                    "layers": group.layers,
                    "parts": [
                        [p.name, p.heads, p.width, p.dtype, p.live.header] for p in group.parts
                    ],
                }
                for group in self.groups
            ]
        }


def probe(live: LiveCaches) -> CacheLayout:
    """Learns the layout of a model's caches; runs on the MLX thread.

    NotCacheable when any layer is of a kind that the store cannot hold.
    """
    model, caches = live.model, live.fresh()
    refuse_unknown_kinds(caches)
    rows = 2
    mx.eval(model(mx.array([[0] * rows]), cache=caches), [cache.state for cache in caches])
    layout = CacheLayout(tuple(_group(caches)))
    if any(cache.offset != rows for cache in caches):
        raise NotCacheable("a layer keeps another number of rows than tokens were fed")
    return layout


def refuse_unknown_kinds(caches: Sequence[Any]) -> None:
    """Raises NotCacheable that names the kinds of layers that have no entry in KINDS."""
    if not caches:
        raise NotCacheable("the model keeps no cache")
    unknown = Counter(type(cache).__name__ for cache in caches if type(cache) not in KINDS)
    if unknown:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(unknown.items()))
        of = f"of {len(caches)} layer caches"
        raise NotCacheable(f"kinds of layers that are not cached yet: {kinds} ({of})")


def _group(caches: Sequence[Any]) -> list[LayerGroup]:
    groups: list[LayerGroup] = []
    for index, cache in enumerate(caches):
        kind = KINDS[type(cache)]
        shapes = kind.shapes(cache)
        last = groups[-1] if groups else None
        if last and (last.kind, last.parts) == (kind.name, shapes):
            groups[-1] = LayerGroup(kind.name, last.first_layer, last.layers + 1, shapes)
        else:
            groups.append(LayerGroup(kind.name, index, 1, shapes))
    return groups
