"""Services under a real systemd, from installation to removal."""

import json
import os
import signal
from pathlib import Path

import pytest

from cachestore.admin import main
from cachestore.deploy.service import NAMES
from tests.support.models import save_tiny_model
from tests.support.user_systemd import user_systemd
from tests.support.waiting import until


class Services:
    """`cachestore-admin service`, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path, code: int | None = 0) -> str:
        """What it says; `code` None: whatever it ends with."""
        ended = main(["service", *map(str, arguments)])
        said = self._capsys.readouterr()
        assert (code in (None, ended), said.err) == (True, ""), said.out
        return said.out

    def status(self, code: int | None = 0) -> dict[str, tuple[str, int | None]]:
        """Of each service its state and process."""
        found = json.loads(self("status", "--json", code=code))
        return {one["service"]: (one["state"], one["pid"]) for one in found}


@pytest.mark.slow
def test_services_are_installed_upgraded_stopped_and_removed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(directory / "model")
    with user_systemd(directory, monkeypatch):
        service = Services(capsys)
        home, runtime = Path.home(), Path(os.environ["XDG_RUNTIME_DIR"], "mlx-cachestore")
        service("install", "--model", model, "--budget", "64MiB")
        first = service.status()
        assert [state for state, _ in first.values()] == ["serving", "serving"]
        assert runtime.stat().st_mode & 0o777 == 0o700
        assert main(["doctor"]) == 0
        assert capsys.readouterr().out.startswith("All is well: cachestore ")

        # With another budget the engine stays as it is, and comes to the new store.
        service("install", "--model", model, "--budget", "96MiB")
        second = service.status()
        assert second["engine"] == first["engine"]
        assert second["cachestore"][1] not in (None, first["cachestore"][1])

        service("stop", "--only", "cachestore")
        third = service.status(code=3)
        assert third["cachestore"] == ("stopped", None)
        assert third["engine"] == first["engine"]  # its socket is still there
        assert main(["doctor"]) == 1
        assert "mlx-cachestore.service) is installed and does not run" in capsys.readouterr().out
        service("restart")
        fourth = service.status()
        assert [state for state, _ in fourth.values()] == ["serving", "serving"]
        assert fourth["engine"][1] != first["engine"][1]
        assert {line.partition(" | ")[0] for line in service("logs").splitlines()} == set(NAMES)

        # After a failure one is started again; what ended in order is not.
        (_, store), (_, engine) = fourth["cachestore"], fourth["engine"]
        assert store is not None
        assert engine is not None
        os.kill(engine, signal.SIGTERM)
        os.kill(store, signal.SIGKILL)

        def anew() -> bool:
            state, pid = service.status(code=None)["cachestore"]
            return state == "serving" and pid != store

        until(anew, "the cachestore to come back", seconds=120)
        fifth = service.status(code=3)
        assert fifth["engine"] == ("stopped", None)

        service("uninstall", "--purge", "--yes")
        assert not any(path.is_file() for path in home.rglob("*"))
        assert not runtime.exists()
        pids = [pid for found in (first, second, fourth, fifth) for _, pid in found.values()]
        assert not [pid for pid in pids if Path("/proc", str(pid)).exists()]
        assert os.listdir(home / ".config" / "systemd" / "user") in ([], ["default.target.wants"])
