"""A real engine whose worker stands still, or dies, or fails in one step, once a file exists.

Run as a module with what happens, the file's path, and the engine's own words behind them.
"""

import runpy
import sys
import time
from pathlib import Path
from typing import Literal


def program(file: Path, what: Literal["stalls", "dies", "fails"] = "stalls") -> list[str]:
    """The command that runs an engine which stands still while `file` exists, dies of it, or
    removes it and fails in this step."""
    return [sys.executable, "-m", "tests.support.stalling", what, str(file)]


if __name__ == "__main__":
    import tests.support.mlx  # noqa: F401 - before anything imports MLX
    from engine.batch import Batch, StepResult
    from engine.core import Core

    what = sys.argv.pop(1)
    gate = Path(sys.argv.pop(1))
    turn, step = Core.turn, Batch.step

    def stalling(self: Core) -> bool:
        while len(self) and gate.exists():
            if what == "dies":
                raise RuntimeError("planted")
            time.sleep(0.01)
        return turn(self)

    def failing(self: Batch) -> StepResult:
        if gate.exists():
            gate.unlink()
            raise RuntimeError("planted")
        return step(self)

    if what == "fails":
        Batch.step = failing  # type: ignore[method-assign]
    else:
        Core.turn = stalling  # type: ignore[method-assign]
    runpy.run_module("engine", run_name="__main__", alter_sys=True)
