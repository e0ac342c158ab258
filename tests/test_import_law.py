"""Who may import whom (docs/decisions.md): the cachestore never touches MLX or the engine."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SERVICES = Path(__file__).resolve().parent.parent / "services"
# What of the cachestore the engine may use: contracts, not the daemon's inside.
OPEN_TO_ENGINE = {
    *("budget", "client", "doctor", "endpoint", "exporter", "flags", "health", "histogram"),
    *("logs", "notify", "record", "serve", "settings", "v1", "variables"),
}


def modules(package: str) -> list[str]:
    paths = (SERVICES / package).rglob("*.py")
    names = (".".join(path.relative_to(SERVICES).with_suffix("").parts) for path in paths)
    return sorted(name for name in names if not name.endswith("__main__"))


def test_every_module_of_the_cachestore_loads_without_mlx_and_engine() -> None:
    lines = [f"import {name.removesuffix('.__init__')}" for name in modules("cachestore")]
    lines += [
        "import sys",
        "bad = {'mlx', 'mlx_lm', 'engine', 'transformers'}",
        "print(sorted({name.partition('.')[0] for name in sys.modules} & bad))",
    ]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", modules("engine"))
def test_the_engine_uses_only_contracts_of_the_cachestore(module: str) -> None:
    path = SERVICES / Path(*module.split(".")).with_suffix(".py")
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "cachestore":
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cachestore."):
            used.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("cachestore")]
            assert not names, "import cachestore modules by name, so that this test can see them"
    assert used <= OPEN_TO_ENGINE


@pytest.mark.parametrize("module", ["mlx.core", "mlx_lm", "engine.config", "transformers"])
def test_lint_refuses_an_import_that_breaks_the_law(module: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "-"]
    for where, code in (("cachestore", 1), ("engine", 0)):
        result = subprocess.run(
            [*command, "--stdin-filename", f"services/{where}/server.py"],
            input=f"import {module}\n",
            cwd=SERVICES.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (where, result.returncode) == (where, code), result.stdout
