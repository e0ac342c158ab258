"""The protos are the reference that client developers read: nothing in them goes without a word."""

import re
from pathlib import Path

import pytest

PROTOS = sorted((Path(__file__).resolve().parent.parent / "proto").rglob("*.proto"))
DECLARATION = re.compile(
    r"^\s*(rpc \w+|message \w+(?<!Request)(?<!Response)\b|enum \w+|[A-Z0-9_]+ = \d+"
    r"|(?:repeated |optional )?(?:map<.*> |[\w.]+ )\w+ = \d+)"
)


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_declaration_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = [
        f"{number + 1}: {line.strip()}"
        for number, line in enumerate(lines)
        if (found := DECLARATION.match(line))
        and not found[1].endswith("UNSPECIFIED = 0")
        and not lines[number - 1].strip().startswith("//")
    ]
    assert not bare
