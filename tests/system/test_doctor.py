"""`cachestore-admin doctor` and `engine doctor`, on set-ups that are wrong in one way each.

What is planted is real: files, sockets, limits, environments and daemons. All are looked at by
`cachestore-admin doctor`, which starts `engine doctor` in a process of its own.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cachestore import admin, variables
from cachestore.deploy.place import systemd_place
from cachestore.doctor import facts
from engine import cli, doctor
from tests.support import plants
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import EngineDaemon, start_engine
from tests.support.models import save_tiny_model
from tests.support.waiting import until


@dataclass(frozen=True)
class Misconfiguration:
    """`words` are of the problem, `advice` of what to do about it."""

    plant: Callable[[Path], AbstractContextManager[plants.Environment]]
    check: str
    words: str
    advice: str
    linux_only: bool = False


MISCONFIGURATIONS = (
    Misconfiguration(
        plants.a_runtime_directory_that_is_open, "runtime-directory", "mode 755", "chmod 700 /tmp/"
    ),
    Misconfiguration(
        plants.a_path_that_no_socket_can_have, "socket-path", "at most 103", variables.RUNTIME_DIR
    ),
    Misconfiguration(
        plants.a_socket_that_is_open, "socket-permissions", "mode 666", "chmod 600 /tmp/"
    ),
    Misconfiguration(
        plants.a_cachestore_that_was_killed,
        "stale-files",
        "cachestore does not run, but left",
        "rm /tmp/",
    ),
    Misconfiguration(
        plants.a_cachestore_that_hangs, "cachestore-answers", "gives no usable answer", "kill -9"
    ),
    Misconfiguration(
        plants.a_cachestore_of_another_version,
        "versions",
        "is version 0.0.1",
        "when its cache can be spared, start it anew: kill ",
    ),
    Misconfiguration(
        plants.a_budget_of_nearly_all_memory, "memory", "90% of this", "with --budget "
    ),
    Misconfiguration(
        plants.a_cachestore_with_few_descriptors,
        "descriptors",
        "may open 40 files",
        "ulimit -n 1024",
        linux_only=True,
    ),
    Misconfiguration(
        plants.a_cachestore_with_little_address_space,
        "memory-limit",
        "ulimit -v",
        "with a --budget well below",
        linux_only=True,
    ),
    Misconfiguration(
        plants.a_cachestore_that_is_refused_memory,
        "slab-failures",
        "no memory for",
        "lower --budget",
        linux_only=True,
    ),
    Misconfiguration(
        plants.a_way_to_shared_memory_that_does_not_exist,
        "shared-memory",
        "'file' is neither memfd nor posix",
        "unset MLX_CACHESTORE_SHM",
    ),
    Misconfiguration(
        plants.a_misspelt_setting, "settings", "no such key; did you mean budget?", "correct it"
    ),
    Misconfiguration(
        plants.a_service_whose_python_is_gone,
        "services",
        "/no/such/python is gone",
        "cachestore-admin service install",
        linux_only=True,
    ),
    Misconfiguration(
        plants.a_service_that_does_not_run,
        "services",
        "is installed and does not run",
        "cachestore-admin service start --only cachestore",
        linux_only=True,
    ),
    Misconfiguration(
        plants.two_backends,
        "mlx-backend",
        "overwrite each other",
        "pip uninstall -y",
        linux_only=True,
    ),
    Misconfiguration(
        plants.another_mlx_lm, "pinned-versions", "mlx-lm is 0.9.9", "-m pip install mlx-lm=="
    ),
    Misconfiguration(
        plants.no_openblas, "openblas", "70 times slower", "libopenblas0-pthread", linux_only=True
    ),
    Misconfiguration(
        plants.a_cache_folder_that_is_a_file,
        "model-cache",
        "is not a folder",
        f"set {variables.CACHE_DIR}",
    ),
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(variables.CONFIG, os.devnull)
    monkeypatch.setenv(variables.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    # Daemons that hang are not to hang the tests.
    monkeypatch.setattr(facts, "STORE_SECONDS", 1.0)
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 1.0)


def examined(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    """The findings of `cachestore-admin`, whose exit code goes with them."""
    code = admin.main([*words, "doctor", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert code == (1 if found else 0)
    return list(found)


@pytest.mark.parametrize("wrong", MISCONFIGURATIONS, ids=lambda wrong: wrong.plant.__name__)
def test_each_misconfiguration_is_found_with_advice_and_nothing_else_is(
    wrong: Misconfiguration,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if wrong.linux_only and sys.platform != "linux":
        pytest.skip("of Linux")
    with wrong.plant(directory) as environment:
        for name, value in {variables.RUNTIME_DIR: str(directory), **environment}.items():
            monkeypatch.setenv(name, value)
        found = examined(capsys)
    assert {finding["check"] for finding in found} == {wrong.check}
    assert wrong.words in found[0]["problem"]
    assert wrong.advice in found[0]["advice"]
    assert all("\n" not in text for finding in found for text in finding.values())


@dataclass
class Running:
    directory: Path
    store: Cachestore
    engine: EngineDaemon


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A healthy set-up."""
    with short_directory() as directory:
        model = save_tiny_model(directory / "model")
        with (
            start_cachestore(directory) as store,
            start_engine(directory, model, "--cachestore", f"unix:{store.socket}") as engine,
        ):
            yield Running(directory, store, engine)


@pytest.fixture
def healthy(running: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setenv(variables.RUNTIME_DIR, str(running.directory))
    return running


def told(*words: str) -> str:
    """What a command says that finds nothing."""
    command = Path(sys.executable).with_name(words[0])
    found = subprocess.run(
        [command, *words[1:]], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    assert found.stdout.count("\n") == 1
    return found.stdout


def test_a_healthy_set_up_is_one_line(healthy: Running) -> None:
    said = told("cachestore-admin", "doctor")
    assert said.startswith("All is well: cachestore ")
    assert f"runs (process {healthy.store.pid}); engine " in said
    assert f"serves {healthy.directory / 'model'} (process {healthy.engine.process.pid})" in said
    assert told("engine", "doctor").startswith("All is well with MLX and models")


def test_nothing_that_runs_is_nothing_wrong(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variables.RUNTIME_DIR, str(directory / "run"))
    said = told("cachestore-admin", "doctor")
    assert "no cachestore runs" in said
    assert "no engine answers" in said
    assert not (directory / "run").exists()


def test_people_get_two_lines_for_each_finding(
    healthy: Running, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that is served by another cachestore than the one that is looked at."""
    with start_cachestore(directory) as other:
        assert admin.main(["--socket", str(other.socket), "doctor"]) == 1
        problem, advice, rest = capsys.readouterr().out.split("\n")
    assert problem.startswith("other-cachestore: the engine (process ")
    assert str(other.socket) in problem
    assert advice.startswith("    give both the same ")
    assert rest == ""


def engine_findings(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    code = cli.main(["doctor", "--json", *words])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert code == (1 if found else 0)
    return list(found)


def test_an_engine_that_hangs_is_found(
    healthy: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine_findings(capsys) == []
    healthy.engine.process.send_signal(signal.SIGSTOP)
    try:
        (found,) = engine_findings(capsys)
    finally:
        healthy.engine.process.send_signal(signal.SIGCONT)
    assert found["check"] == "engine-answers"
    assert f"process {healthy.engine.process.pid} has " in found["problem"]
    assert f"kill {healthy.engine.process.pid}" in found["advice"]


def test_an_engine_that_was_named_must_answer(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variables.RUNTIME_DIR, str(directory))
    assert engine_findings(capsys) == []
    (found,) = engine_findings(capsys, "--engine", f"unix:{directory / 'none.sock'}")
    assert found["check"] == "engine-answers"
    assert "engine serve" in found["advice"]


def test_a_folder_that_cannot_be_looked_at_is_no_reason_to_fail(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variables.RUNTIME_DIR, str(directory))
    for name in (variables.CACHE_DIR, "HF_HOME"):
        # A name that no folder can have: root may look at all others.
        for path in (directory / ("d" * 300), "~no-such-user/models"):
            monkeypatch.setenv(name, str(path))
            assert engine_findings(capsys) == []
    monkeypatch.setattr(
        facts, "own_place", lambda: systemd_place(directory / ("d" * 300), directory)
    )
    assert examined(capsys) == []


def test_an_engine_doctor_that_fails_is_a_finding(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variables.RUNTIME_DIR, str(directory))
    for program, said in (
        (("sleep", "60"), "has not ended within 0 s"),
        ((sys.executable, "-c", "raise SystemExit('no module named mlx')"), "no module named mlx"),
        (("/no/such/python",), "cannot be run"),
        (("printf", r"\377"), "it says nothing"),
    ):
        monkeypatch.setattr(facts, "_ENGINE", program)
        monkeypatch.setattr(facts, "ENGINE_SECONDS", 0.3 if program[0] == "sleep" else 30.0)
        (found,) = examined(capsys)
        assert found["check"] == "engine-doctor"
        assert said in found["problem"]


def test_a_service_is_started_anew_as_a_service(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To kill it would end it for good."""
    if sys.platform != "linux":
        pytest.skip("of Linux")
    monkeypatch.setenv(variables.RUNTIME_DIR, str(directory))
    with (
        plants.a_service_that_does_not_run(directory) as environment,
        plants.a_cachestore_of_another_version(directory),
    ):
        monkeypatch.setenv("HOME", environment["HOME"])
        (found,) = examined(capsys)
    assert found["check"] == "versions"
    assert found["advice"] == (
        "when its cache can be spared, start it anew: "
        "cachestore-admin service restart --only cachestore"
    )


def test_an_engine_whose_cachestore_dies_is_found(
    healthy: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one: it ends the cachestore of the healthy set-up."""
    healthy.store.terminate()

    def alone() -> list[dict[str, Any]]:
        return engine_findings(capsys)

    (found,) = until(alone, "the engine to notice")
    assert found["check"] == "engine-caches"
    assert "reaches no cachestore" in found["problem"]
    assert "cachestore serve" in found["advice"]
