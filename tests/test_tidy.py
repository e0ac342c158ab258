"""The house rules that a machine can check."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    paths = [ROOT / name for name in listed if "_pb2" not in name]
    return [path for path in paths if path.exists()]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_reader_takes_a_file_and_a_function_in_at_one_sitting(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES_MAX
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert not long


def asserts(node: ast.AST, helpers: set[str]) -> bool:
    """Whether a function has something that can fail, itself or through `helpers`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert):
            return True
        if isinstance(inner, ast.Call):
            name = getattr(inner.func, "id", getattr(inner.func, "attr", ""))
            if name in helpers or name.startswith("assert") or name in ("raises", "until"):
                return True
    return False


def test_no_test_without_an_assertion() -> None:
    empty = []
    for path in sources():
        if not path.name.startswith("test_"):
            continue
        functions = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)
        ]
        helpers = {n.name for n in functions if asserts(n, set())}
        empty += [
            f"{path.name}: {node.name}"
            for node in functions
            if node.name.startswith("test_") and not asserts(node, helpers)
        ]
    assert not empty
