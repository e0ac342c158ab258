"""A real engine whose worker stands still, or dies, in the middle of a step once a file exists.

Run as a module with what happens, the file's path, and the engine's own words behind them.
"""

import runpy
import sys
import time
from pathlib import Path


def program(file: Path, dies: bool = False) -> list[str]:
    """The command that runs an engine which stands still while `file` exists."""
    what = "dies" if dies else "stalls"
    return [sys.executable, "-m", "tests.support.stalling", what, str(file)]


if __name__ == "__main__":
    import tests.support.mlx  # noqa: F401 - before anything imports MLX
    from engine.core import Core

    dying = sys.argv.pop(1) == "dies"
    gate = Path(sys.argv.pop(1))
    turn = Core.turn

    def stalling(self: Core) -> bool:
        while len(self) and gate.exists():
            if dying:
                raise RuntimeError("planted")
            time.sleep(0.01)
        return turn(self)

    Core.turn = stalling  # type: ignore[method-assign]
    runpy.run_module("engine", run_name="__main__", alter_sys=True)
