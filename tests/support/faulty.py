"""Real programs that die at a chosen moment, again and again at the same one.

Run as a module, this runs another module after wrapping one function of it, so that the process
kills itself with SIGKILL right before or right after a call. The programs know nothing of it.
"""

import functools
import importlib
import inspect
import itertools
import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class Death:
    """SIGKILL `moment` ("before" or "after") the `call`-th call of `function` (module:name)."""

    moment: str
    function: str
    call: int = 1

    def __str__(self) -> str:
        return f"{self.moment} {self.function.partition(':')[2]}"

    def program(self, module: str) -> list[str]:
        """The command that runs a module until that moment."""
        words = [self.moment, self.function, str(self.call), module]
        return [sys.executable, "-m", "tests.support.faulty", *words]

    def plan(self) -> None:
        """Wrap the function in this process."""
        module, _, name = self.function.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, last, self._wrap(getattr(owner, last)))

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        assert not inspect.iscoroutinefunction(function)
        calls = itertools.count(1)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            fatal = next(calls) == self.call
            if fatal and self.moment == "before":
                _die()
            result = function(*args, **kwargs)
            if fatal:
                _die()
            return result

        return wrapped


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    import tests.support.mlx  # noqa: F401 - before anything imports MLX

    death_moment, death_function, death_call, program, *arguments = sys.argv[1:]
    Death(death_moment, death_function, int(death_call)).plan()
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
