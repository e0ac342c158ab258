"""docs/models.md is what the committed results give, and they are of today's matrix."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.matrix import __main__ as command
from tests.matrix.cells import ARCHITECTURES, Cell, cells
from tests.matrix.results import Ran, Results, page

FIRST, SECOND, *REST = cells("mamba2")


def ran(*which: Cell, **said: str) -> Ran:
    """Cells that hold; `said`: what is wrong with the first of them."""
    made = Ran("batched", ["2 x rows"], "", {str(cell): "" for cell in which})
    if said:
        made.cells[str(which[0])] = said["wrong"]
    return made


def results() -> Results:
    """One cell of each architecture has run on the CPU."""
    return Results(ran={name: {"cpu": ran(next(iter(cells(name))))} for name in ARCHITECTURES})


def test_the_committed_page_is_not_stale() -> None:
    assert command.check() == 0


def test_results_of_another_matrix_are_stale(tmp_path: Path) -> None:
    made = results()
    assert made.stale() == []
    made.add("gemma2", "cpu", ran(next(iter(cells("gemma2"))), wrong="2 apart"))
    made.save(tmp_path / "matrix.json")
    held = json.loads((tmp_path / "matrix.json").read_text())
    held["mlx_lm"] = "0.1"
    held["architectures"]["llama"]["cpu"]["cells"] += "."
    del held["architectures"]["qwen3"]
    (tmp_path / "matrix.json").write_text(json.dumps(held))
    stale = Results.load(tmp_path / "matrix.json").stale()
    assert [reason.split()[0] for reason in stale] == ["they", "llama", "qwen3", "gemma2"]


def test_what_is_wrong_on_another_backend_is_told_and_not_stale() -> None:
    made = results()
    made.add("mamba2", "cuda", ran(FIRST, SECOND, wrong="2 apart"))
    assert made.stale() == []
    told = page(made)
    assert "| 1 of 84 | 2 of 84, **1 wrong** |" in told
    assert f"- `{FIRST}` on `cuda`: 2 apart" in told
    assert "2 on `cuda`, where 1 hold" in told


def test_a_page_tells_what_is_reused() -> None:
    told = page(results())
    assert "| `llama` | batched | 2 x rows | all | all | all | all | 1 of 108 |" in told
    assert "| to the checkpoint | all | to the checkpoint | to the checkpoint |" in told
    assert "does not hold" not in told


def test_results_come_back_as_they_were_saved(tmp_path: Path) -> None:
    made = results()
    made.add("mamba2", "cuda", ran(FIRST, SECOND, wrong="2 apart"))
    made.save(tmp_path / "matrix.json")
    assert Results.load(tmp_path / "matrix.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["matrix.json"]


def test_runs_add_up_and_the_last_word_counts() -> None:
    made, other = Results(), Results()
    made.add("mamba2", "cpu", ran(FIRST, wrong="2 apart"))
    other.add("mamba2", "cpu", ran(SECOND))
    other.add("mamba2", "cuda", ran(FIRST))
    made.merge(other)
    assert made.on("cpu") == {str(FIRST): "2 apart", str(SECOND): ""}
    assert made.on("cuda") == {str(FIRST): ""}
    other.add("mamba2", "cpu", ran(FIRST))
    made.merge(other)
    assert made.on("cpu") == {str(FIRST): "", str(SECOND): ""}
    assert made.missing("cpu", cells("mamba2")) == REST


def test_results_of_another_mlx_lm_do_not_add() -> None:
    with pytest.raises(ValueError, match=r"0\.1 do not add"):
        Results().merge(Results(mlx_lm="0.1"))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["matrix", *arguments])
    return command.main()


def test_what_ran_before_an_end_is_kept_and_the_rest_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "matrix.json"
    asked: list[list[Cell]] = []

    def ended(wanted: Sequence[Cell], jobs: int) -> Iterator[tuple[str, Ran]]:
        asked.append([*wanted])
        yield wanted[0].architecture, ran(wanted[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", ended)
    monkeypatch.setattr(command, "JSON", tmp_path / "none.json")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, "--missing", "--only", "mamba2", "--results", str(path))
    assert asked == [[FIRST, SECOND, *REST], [SECOND, *REST]]
    assert Results.load(path).missing("cpu", cells("mamba2")) == REST
    # All of it anew: what was known of them is of other code.
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "--all", "--only", "mamba2", "--results", str(path))
    assert Results.load(path).missing("cpu", cells("mamba2")) == [SECOND, *REST]


def test_cells_whose_process_died_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "matrix.json"
    monkeypatch.setattr(command, "_run", lambda wanted, jobs: [("mamba2", ran(*wanted[1:]))])
    assert run(monkeypatch, "--all", "--only", "mamba2", "--results", str(path)) == 1
    assert Results.load(path).ran["mamba2"]["cpu"].failures == {str(FIRST): "its process died"}


def test_results_of_another_machine_are_brought_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    other = Results()
    other.add("mamba2", "metal", ran(FIRST))
    other.save(there)
    assert run(monkeypatch, "--merge", str(there), "--results", str(here)) == 0
    assert Results.load(here) == other
    with pytest.raises(SystemExit):
        run(monkeypatch, "--merge", str(tmp_path / "no.json"), "--results", str(here))
    assert "is not a file" in capsys.readouterr().err
