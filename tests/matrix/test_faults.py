"""A cell fails when what comes out of the store is a little wrong, in any kind of layer."""

from typing import Any

import mlx.core as mx
import pytest

from engine.core import Core
from engine.kv import kinds, states
from tests.matrix import oracle
from tests.matrix.bench import bench
from tests.matrix.cells import Company, Match, Reach, Window, cells
from tests.support.daemons import Cachestore, short_directory

KINDS = {
    "llama": kinds.PlainKV,
    "gemma3_text": states.Window,
    "mamba2": states.Recurrent,
    "llama4": states.Chunk,
}


@pytest.mark.parametrize("architecture", KINDS)
def test_a_wrong_number_shows(
    cachestore: Cachestore, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = KINDS[architecture]
    right = kind.restore

    def restore(self: Any, parts: kinds.Named, position: int) -> Any:
        off = {name: tuple(1.01 * a for a in arrays) for name, arrays in parts.items()}
        return right(self, off, position)

    cell = next(
        cell
        for cell in cells(architecture)
        if (cell.match, cell.window, cell.reach, cell.company)
        == (Match.LCP, Window.ABOVE, Reach.AT, Company.ALONE)
    )
    with (
        short_directory() as directory,
        bench(architecture, "none", cachestore, directory) as running,
    ):
        running.assert_holds(cell)
        monkeypatch.setattr(kind, "restore", restore)
        with pytest.raises(AssertionError, match="apart"):
            running.assert_holds(cell)


def test_near_ties_are_found(cachestore: Cachestore) -> None:
    tokens = [*range(40)]
    with (
        short_directory() as directory,
        bench("qwen3_moe", "none", cachestore, directory) as running,
    ):
        assert not running._near_a_tie(tokens, running._cold(tokens))

        def tie(core: Core) -> None:
            """Of one layer, all experts are as good as the first one."""
            gate: Any = core.caches.model.layers[-1].mlp.gate
            gate.weight = mx.broadcast_to(gate.weight[:1], gate.weight.shape)

        running.engine.on_worker(tie)
        cold = running._cold(tokens)
        assert oracle.agree(cold, running._cold(tokens), tolerance=0)
        assert running._near_a_tie(tokens, cold)
        assert oracle.agree(cold, running._cold(tokens), tolerance=0), "the weights have changed"


def test_a_hit_that_is_missed_shows(
    cachestore: Cachestore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        short_directory() as directory,
        bench("mamba2", "none", cachestore, directory) as running,
    ):
        monkeypatch.setattr(running.engine.prefix, "pack_checkpoint", None)
        with pytest.raises(AssertionError, match="0 tokens cached instead of 15"):
            running.assert_holds(next(iter(cells("mamba2"))))
