"""What a lossy codec may do: add its own error once to rows and windows, and nothing to state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.core import Core
from engine.kv import kinds
from engine.kv.layout import CacheLayout
from engine.kv.states import Recurrent
from tests.support.engines import InProcess

# Root mean square of the error, relative to that of what was encoded: 8 bits in groups of 64, and
# three bits for each coordinate of a direction.
ERROR_MAX = {"q8": 0.01, "turbo3": 0.25}
# What is stored without loss differs by float noise alone.
NOISE_MAX = 1e-4


@dataclass(frozen=True)
class Attached:
    """Caches of the first `rows` tokens of a request, as the engine would go on from them."""

    rows: int
    caches: list[Any] | None

    @classmethod
    def of(cls, engine: InProcess, tokens: Sequence[int]) -> "Attached":
        found = engine.prefix._find(tuple(tokens), (), lambda: True)
        try:
            attachment = found.attachment
            if attachment is None:
                return cls(0, None)
            engine.on_worker(lambda _: [block.allocate() for block in attachment.blocks])
            for block in attachment.blocks:
                block.copy()
            engine.on_worker(lambda _: [block.decode() for block in attachment.blocks])
            return cls(found.rows, engine.on_worker(lambda _: attachment.caches()))
        finally:
            assert engine.engine.link is not None
            engine.engine.link.drop(found.lease.id)

    def assert_close(
        self, engine: InProcess, tokens: Sequence[int], cuts: Sequence[int], codec: str
    ) -> None:
        """The caches hold what the same tokens, computed in chunks that end at `cuts`, come to."""
        layout, attached = engine.prefix._policy.codec.layout, self.caches
        assert attached is not None

        def distances(core: Core) -> list[tuple[bool, float]]:
            fresh = core.caches.fresh()
            begin = 0
            for end in cuts:
                mx.eval(core.caches.model(mx.array([tokens[begin:end]]), cache=fresh))
                begin = end
            pairs = zip(
                _contents(layout, attached, begin), _contents(layout, fresh, begin), strict=True
            )
            return [(encoded, _relative_error(ours, cold)) for (encoded, ours), (_, cold) in pairs]

        for encoded, distance in engine.on_worker(distances):
            bound = ERROR_MAX[codec] if encoded else NOISE_MAX
            assert distance <= bound, f"a part of a layer is {distance:.2g} off"


def _contents(layout: CacheLayout, caches: list[Any], rows: int) -> list[tuple[bool, Any]]:
    """Each part of each leaf, and whether a codec may apply to it."""
    taken = kinds.rows(layout, caches, 0, 0, rows), kinds.snapshot(layout, caches, 0).leaves
    recurrent = {
        leaf
        for group in layout.states
        for leaf in group.layers
        if isinstance(group.kind, Recurrent)
    }
    return [
        (leaf not in recurrent, np.array(array.astype(mx.float32)))
        for leaves in taken
        for leaf, parts in enumerate(leaves)
        for part in parts
        for array in part
    ]


def _relative_error(ours: Any, cold: Any) -> float:
    assert ours.shape == cold.shape
    return float(np.linalg.norm(ours - cold) / max(float(np.linalg.norm(cold)), 1e-9))
