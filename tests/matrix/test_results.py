"""docs/models.md is what the committed results give, and they are of today's matrix."""

from pathlib import Path

from tests.matrix.__main__ import check
from tests.matrix.cells import ARCHITECTURES, cells
from tests.matrix.results import Architecture, Results, page


def results(**failures: str) -> Results:
    made = Results.load()
    made.architectures = {}
    made.update(
        {
            name: Architecture("batched", ["2 x rows"], "", 9, len(list(cells(name))), {**failures})
            for name in ARCHITECTURES
        }
    )
    return made


def test_the_committed_page_is_not_stale() -> None:
    assert check() == 0


def test_results_of_another_matrix_are_stale() -> None:
    made = results()
    assert made.stale() == []
    made.architectures["llama"].of -= 1
    del made.architectures["qwen3"]
    made.architectures["gemma2"].failures["a cell"] = "2 apart"
    made.mlx_lm = "0.1"
    assert [reason.split()[0] for reason in made.stale()] == ["they", "llama", "qwen3", "gemma2"]


def test_a_page_tells_what_is_reused_and_what_is_wrong() -> None:
    made = results()
    assert "| `llama` | batched | 2 x rows | all | all | all | all |" in page(made)
    assert "| to the checkpoint | all | to the checkpoint | to the checkpoint |" in page(made)
    cell = next(iter(cells("mamba2")))
    made.architectures["mamba2"].failures[str(cell)] = "2 apart"
    assert f"- `{cell}`: 2 apart" in page(made)
    assert "**1 of" in page(made)


def test_results_come_back_as_they_were_saved(tmp_path: Path) -> None:
    made = results(cell="wrong")
    made.save(tmp_path / "matrix.json")
    assert Results.load(tmp_path / "matrix.json") == made
