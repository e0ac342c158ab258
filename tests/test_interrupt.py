"""Ctrl-C before a command has begun: its modules load for a second, and people are quicker."""

import subprocess
import sys

import pytest

# The signal at a chosen moment: as the first large module is looked for.
INTERRUPTED = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "grpc":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from {package}.__main__ import {name}
sys.exit({name}())
"""


@pytest.mark.parametrize(
    ("package", "name"), [("engine", "main"), ("cachestore", "main"), ("cachestore", "admin")]
)
def test_ctrl_c_while_modules_load_is_no_traceback(package: str, name: str) -> None:
    code = INTERRUPTED.format(package=package, name=name)
    ran = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")
