"""What came of the cells: kept as JSON, and shown to people as docs/models.md."""

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from engine.backend import Name
from tests.matrix.cells import (
    ARCHITECTURES,
    DOES_NOT_LOAD,
    NOT_CACHED,
    Cell,
    Match,
    all_cells,
    cells,
    course,
)
from tests.support.zoo import HEIRS, METAL_ONLY, WRAPPERS

DOCS = Path(__file__).resolve().parents[2] / "docs"
JSON, PAGE = DOCS / "matrix.json", DOCS / "models.md"
COMMAND = "python -m tests.matrix --missing"
# CI runs there. Nothing may be wrong on it; of other backends the page says what is.
REFERENCE: Name = "cpu"
# Of a cell that has not run, that holds, and that does not.
_MARKS = ".ox"

_ABOUT = """\
# Models

Every architecture of mlx-lm {mlx_lm} whose cache is of a kind of its own, as a tiny random model, \
served from the cache in every way there is, and compared with the same request served cold. There \
are {all} such cells; {some} have run on one backend at least: {counts}. Architectures that are \
not named have plain rows, as `llama` has.

Generated; do not edit. `python -m tests.matrix --all` runs every cell, `--missing` those that \
have not run on this backend yet, with `--only` those of some architectures; `--pairwise` a \
selection in which each architecture meets each kind of match, window, checkpoint and codec, which \
CI runs on the CPU too. The last columns say how many cells of an architecture have run on which \
backend.

- **Runs**: `batched`, prompts and replies together; `prefill-one`, prompts one at a time and \
replies together; `one-row`, one request at a time. Found by the check at load, because mlx-lm \
gives wrong results otherwise.
- **Layers**: *rows* are reused up to the last token that matches, *checkpoints* where one was \
taken: where chats part, where prompts have parted before, one token before the end of the \
prompt, at the end of the reply, and every `--checkpoint-stride` tokens.
- **Reused**, of a request that was stored (*exact*), goes on from what was stored (*prefix*), \
ends inside it (*supersequence*) or parts from it (*lcp*): *all* that matches, or what lies before \
the last *checkpoint*. At least one token is always computed.
"""


@dataclass
class Ran:
    """An architecture on one backend. `mode`: how it runs in the batch; `layers`: how each kind of
    them is cached; `cells`: by the names of those that ran, what is wrong, and "" when they hold.
    """

    mode: str = ""
    layers: list[str] = field(default_factory=list)
    not_cached_reason: str = ""
    cells: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> dict[str, str]:
        return {cell: said for cell, said in self.cells.items() if said}

    def add(self, newer: "Ran") -> None:
        # An engine that did not start could not say how it runs.
        if newer.mode:
            self.mode, self.layers = newer.mode, newer.layers
            self.not_cached_reason = newer.not_cached_reason
        self.cells.update(newer.cells)

    @classmethod
    def loaded(cls, name: str, held: dict[str, Any]) -> "Ran":
        """Without the results of another matrix, which has other cells."""
        marks, failures = held.pop("cells"), held.pop("failures")
        names = _names(name)
        if len(marks) != len(names):
            return cls(**held)
        pairs = zip(names, marks, strict=True)
        ran = {cell: failures.get(cell, "") for cell, mark in pairs if mark != "."}
        return cls(**held, cells=ran)

    def saved(self, name: str) -> dict[str, Any]:
        """A mark for each cell of the architecture, in their order."""
        marks = [_MARKS[(n in self.cells) + bool(self.cells.get(n))] for n in _names(name)]
        return {**vars(self), "cells": "".join(marks), "failures": self.failures}


@dataclass
class Results:
    """Runs add to them, on any machine."""

    mlx_lm: str = field(default_factory=lambda: version("mlx-lm"))
    # By architecture and backend.
    ran: dict[str, dict[Name, Ran]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = JSON) -> "Results":
        """Empty when there are none yet."""
        if not path.exists():
            return cls()
        held = json.loads(path.read_text())
        return cls(
            held["mlx_lm"],
            {
                name: {backend: Ran.loaded(name, each) for backend, each in of.items()}
                for name, of in held["architectures"].items()
                if name in ARCHITECTURES
            },
        )

    def save(self, path: Path = JSON) -> None:
        """Whole or not at all: it is done after every cell, and a run may end at any moment."""
        held = {
            name: {backend: ran.saved(name) for backend, ran in self._of(name)}
            for name in ARCHITECTURES
            if name in self.ran
        }
        written = path.with_name(path.name + ".new")
        written.write_text(
            json.dumps({"mlx_lm": self.mlx_lm, "architectures": held}, indent=1) + "\n"
        )
        written.replace(path)

    def _of(self, name: str) -> list[tuple[Name, Ran]]:
        """Backends always come in the same order."""
        held = self.ran.get(name, {})
        return [(backend, held[backend]) for backend in get_args(Name) if backend in held]

    def add(self, name: str, backend: Name, ran: Ran) -> None:
        self.ran.setdefault(name, {}).setdefault(backend, Ran()).add(ran)

    def merge(self, other: "Results") -> None:
        """Where a cell ran twice on a backend, what the other results say counts. Raises ValueError
        when they are of another mlx-lm."""
        if other.mlx_lm != self.mlx_lm:
            raise ValueError(f"results of mlx-lm {other.mlx_lm} do not add to {self.mlx_lm}'s")
        for name, of in other.ran.items():
            for backend, ran in of.items():
                self.add(name, backend, ran)

    @property
    def of_installed(self) -> bool:
        """Whether they are of the mlx-lm that is installed."""
        return self.mlx_lm == version("mlx-lm")

    def on(self, backend: Name) -> dict[str, str]:
        """What ran there, by the name of the cell."""
        return {
            cell: said
            for of in self.ran.values()
            if backend in of
            for cell, said in of[backend].cells.items()
        }

    def missing(self, backend: Name, wanted: Iterable[Cell]) -> list[Cell]:
        """Those that have not run there."""
        ran = self.on(backend)
        return [cell for cell in wanted if str(cell) not in ran]

    def forget(self, backend: Name, wanted: Iterable[Cell]) -> None:
        """They are about to run again."""
        for cell in wanted:
            of = self.ran.get(cell.architecture, {})
            if backend in of:
                of[backend].cells.pop(str(cell), None)

    def stale(self) -> list[str]:
        """Why these are not results of today's matrix that may be shown."""
        reasons = []
        if not self.of_installed:
            reasons.append(
                f"they are of mlx-lm {self.mlx_lm}, and {version('mlx-lm')} is installed"
            )
        for name in ARCHITECTURES:
            ran = self.ran.get(name, {}).get(REFERENCE, Ran())
            if not ran.cells:
                reasons.append(f"{name} has not run on {REFERENCE}")
            elif ran.failures:
                reasons.append(f"{name} has cells that do not hold on {REFERENCE}")
        return reasons


@functools.cache
def _names(architecture: str) -> Sequence[str]:
    return [str(cell) for cell in cells(architecture)]


def page(results: Results) -> str:
    """docs/models.md."""
    by_backend = {backend: results.on(backend) for backend in get_args(Name)}
    by_backend = {backend: ran for backend, ran in by_backend.items() if ran}
    counts = [
        f"{len(ran):,} on `{backend}`, where {sum(not said for said in ran.values()):,} hold"
        for backend, ran in by_backend.items()
    ]
    others = ", ".join(f"`{name}` of `{of}`" for name, of in (WRAPPERS | HEIRS).items())
    lines = [
        _ABOUT.format(
            mlx_lm=results.mlx_lm,
            all=f"{len(all_cells()):,}",
            some=f"{len(set().union(*by_backend.values())):,}",
            counts=", and ".join(counts),
        ),
        f"| architecture | runs | layers | exact | prefix | supersequence | lcp "
        f"| {' | '.join(by_backend)} |",
        f"|---|---|---|---|---|---|---|{'---:|' * len(by_backend)}",
        *(
            _row(name, results.ran[name], by_backend)
            for name in ARCHITECTURES
            if name in results.ran
        ),
        "",
        f"Some are made of one of these, and have its caches: {others}.",
        *(f"`{name}` runs with Metal alone, and has not been tried." for name in METAL_ONLY),
        *(
            f"`{name}` does not load: transformers refuses the names of its layers."
            for name in DOES_NOT_LOAD
        ),
    ]
    failures = [
        f"- `{cell}` on `{backend}`: {said}"
        for backend, ran in by_backend.items()
        for cell, said in ran.items()
        if said
    ]
    if failures:
        lines += ["", "## Cells that do not hold", "", *failures]
    return "\n".join(lines) + "\n"


def _row(name: str, of: dict[Name, Ran], backends: Iterable[Name]) -> str:
    first = next(iter(of.values()))
    layers = "<br>".join(first.layers) or f"not cached: {first.not_cached_reason}"
    modes = list(dict.fromkeys(ran.mode for ran in of.values()))
    return (
        " | ".join(
            [
                f"| `{name}`",
                " or ".join(modes),
                layers,
                *(_reused(name, match) for match in Match),
                *(_count(name, of.get(backend, Ran())) for backend in backends),
            ]
        )
        + " |"
    )


def _count(name: str, ran: Ran) -> str:
    wrong = f", **{len(ran.failures)} wrong**" if ran.failures else ""
    return f"{len(ran.cells)} of {len(_names(name))}{wrong}"


def _reused(name: str, match: Match) -> str:
    """What the cells of this kind of match prove."""
    if name in NOT_CACHED:
        return "nothing"
    courses = [(course(c), c.checkpointed) for c in cells(name) if c.match is match]
    whole = all(each.cached(checkpointed) == each.matched for each, checkpointed in courses)
    return "all" if whole else "to the checkpoint"
