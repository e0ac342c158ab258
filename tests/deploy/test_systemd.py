"""Services under a real systemd, from installation to removal."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import save_tiny_model
from tests.support.user_systemd import user_systemd

ADMIN = (sys.executable, "-c", "import sys; from cachestore.admin import main; sys.exit(main())")
ROW = re.compile(r"^(engine|cachestore)\s+(not serving|serving|stopped|failed)\s+(\d+)?", re.M)


class Services:
    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def __call__(self, *arguments: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            [*ADMIN, "service", *map(str, arguments)],
            env={**self._environment, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, ""), done.stdout
        return done.stdout

    def status(self, code: int = 0) -> dict[str, tuple[str, str]]:
        """Of each service its state and process."""
        return {name: (state, pid) for name, state, pid in ROW.findall(self("status", code=code))}


@pytest.mark.slow
def test_services_are_installed_upgraded_stopped_and_removed(directory: Path) -> None:
    model = save_tiny_model(directory / "model")
    with user_systemd(directory) as environment:
        service = Services(environment)
        home = Path(environment["HOME"])
        runtime = Path(environment["XDG_RUNTIME_DIR"], "mlx-cachestore")
        service("install", "--model", model, "--budget", "64MiB")
        first = service.status()
        assert [state for state, _ in first.values()] == ["serving", "serving"]
        assert runtime.stat().st_mode & 0o777 == 0o700

        # Nothing changed, then the store's budget: the engine stays, and comes to the new store.
        service("install", "--model", model, "--budget", "64MiB")
        assert service.status() == first
        service("install", "--model", model, "--budget", "96MiB")
        second = service.status()
        assert second["engine"] == first["engine"]
        assert second["cachestore"][1] not in ("", first["cachestore"][1])

        service("stop", "--only", "cachestore")
        third = service.status(code=3)
        assert third["cachestore"] == ("stopped", "")
        assert third["engine"] == first["engine"]  # its socket is still there
        service("start")
        service("restart", "--only", "engine")
        fourth = service.status()
        assert [state for state, _ in fourth.values()] == ["serving", "serving"]
        assert fourth["engine"][1] != first["engine"][1]
        assert re.search(
            r"^engine \| .*\n(.*\n)*cachestore \| |^cachestore \| ", service("logs"), re.M
        )

        service("uninstall", "--purge", "--yes")
        assert not any(path.is_file() for path in home.rglob("*"))
        assert not runtime.exists()
        pids = {pid for found in (first, second, fourth) for _, pid in found.values()}
        assert not [pid for pid in pids if Path("/proc", pid).exists()]
        assert os.listdir(home / ".config" / "systemd" / "user") in ([], ["default.target.wants"])
