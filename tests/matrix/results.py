"""What came of the cells: kept as JSON, and shown to people as docs/models.md."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.matrix.cells import ARCHITECTURES, DOES_NOT_LOAD, NOT_CACHED, Cell, Match, cells, course
from tests.support.zoo import METAL_ONLY

DOCS = Path(__file__).resolve().parents[2] / "docs"
JSON, PAGE = DOCS / "matrix.json", DOCS / "models.md"
COMMAND = "python -m tests.matrix --all"

_ABOUT = """\
# Models

Every architecture of mlx-lm {mlx_lm} whose cache is of a kind of its own, as a tiny random model, \
served from the cache in every way there is, and compared with the same request served cold. There \
are {all} such cells; {ran} have run, and {passed} of them hold. Architectures that are not named \
have plain rows, as `llama` has.

Generated; do not edit. `{command}` runs every cell, with `--only` those of some architectures; \
`--pairwise` a selection in which each architecture meets each kind of match, window, checkpoint \
and codec, which CI runs too. The last column says how many cells of an architecture have run.

- **Runs**: `batched`, prompts and replies together; `prefill-one`, prompts one at a time and \
replies together; `one-row`, one request at a time. Found by the check at load, because mlx-lm \
gives wrong results otherwise.
- **Layers**: *rows* are reused up to the last token that matches, *checkpoints* where one was \
taken: where chats part, one token before the end of the prompt, at the end of the reply, \
and every `--checkpoint-stride` tokens.
- **Reused**, of a request that was stored (*exact*), goes on from what was stored (*prefix*), \
ends inside it (*supersequence*) or parts from it (*lcp*): *all* that matches, or what lies before \
the last *checkpoint*. At least one token is always computed.
"""


@dataclass
class Architecture:
    """`mode`: how it runs in the batch; `layers`: how each kind of them is cached; `failures`: by
    the name of the cell."""

    mode: str
    layers: list[str]
    not_cached_reason: str = ""
    # How many have run, and how many there are.
    cells: int = 0
    of: int = 0
    failures: dict[str, str] = field(default_factory=dict)


@dataclass
class Results:
    mlx_lm: str
    architectures: dict[str, Architecture]

    @classmethod
    def load(cls, path: Path = JSON) -> "Results":
        """Of the installed mlx-lm, and empty, when there are none yet."""
        if not path.exists():
            return cls(version("mlx-lm"), {})
        held = json.loads(path.read_text())
        architectures = {name: Architecture(**each) for name, each in held["architectures"].items()}
        return cls(held["mlx_lm"], architectures)

    def save(self, path: Path = JSON) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def update(self, ran: Mapping[str, Architecture]) -> None:
        """Architectures stay in the order of the zoo; those that left it are forgotten."""
        self.mlx_lm = version("mlx-lm")
        known = {**self.architectures, **ran}
        self.architectures = {name: known[name] for name in ARCHITECTURES if name in known}

    def stale(self) -> list[str]:
        """Why these are not results of today's matrix that may be shown."""
        reasons = []
        if self.mlx_lm != version("mlx-lm"):
            reasons.append(
                f"they are of mlx-lm {self.mlx_lm}, and {version('mlx-lm')} is installed"
            )
        for name in ARCHITECTURES:
            count = len(list(cells(name)))
            ran = self.architectures.get(name)
            if ran is None or not ran.cells:
                reasons.append(f"{name} has not run")
            elif ran.of != count:
                reasons.append(f"{name} has {count} cells, and had {ran.of}")
            elif ran.failures:
                reasons.append(f"{name} has cells that do not hold")
        return reasons


def page(results: Results) -> str:
    """docs/models.md."""
    ran = sum(each.cells for each in results.architectures.values())
    failed = sum(len(each.failures) for each in results.architectures.values())
    lines = [
        _ABOUT.format(
            mlx_lm=results.mlx_lm,
            passed=f"{ran - failed:,}",
            ran=f"{ran:,}",
            all=f"{sum(each.of for each in results.architectures.values()):,}",
            command=COMMAND,
        ),
        "| architecture | runs | layers | exact | prefix | supersequence | lcp | cells |",
        "|---|---|---|---|---|---|---|---:|",
        *(_row(name, each) for name, each in results.architectures.items()),
        "",
        *(f"`{name}` runs with Metal alone, and has not been tried." for name in METAL_ONLY),
        *(
            f"`{name}` does not load: transformers refuses the names of its layers."
            for name in DOES_NOT_LOAD
        ),
    ]
    failures = [
        f"- `{cell}`: {message}"
        for each in results.architectures.values()
        for cell, message in each.failures.items()
    ]
    if failures:
        lines += ["", "## Cells that do not hold", "", *failures]
    return "\n".join(lines) + "\n"


def _row(name: str, ran: Architecture) -> str:
    layers = "<br>".join(ran.layers) or f"not cached: {ran.not_cached_reason}"
    reused = [_reused(name, match, ran) for match in Match]
    passed = ran.cells - len(ran.failures)
    return f"| {' | '.join([f'`{name}`', ran.mode, layers, *reused, f'{passed} of {ran.cells}'])} |"


def _reused(name: str, match: Match, ran: Architecture) -> str:
    """What the cells of this kind of match have proved."""
    of_match = [cell for cell in cells(name) if cell.match is match]
    wrong = sum(str(cell) in ran.failures for cell in of_match)
    if wrong:
        return f"**{wrong} of {len(of_match)} wrong**"
    if name in NOT_CACHED:
        return "nothing"
    return "all" if _all_is_reused(of_match) else "to the checkpoint"


def _all_is_reused(of_match: Iterable[Cell]) -> bool:
    courses = [(course(cell), cell.checkpointed) for cell in of_match]
    return all(each.cached(checkpointed) == each.matched for each, checkpointed in courses)
