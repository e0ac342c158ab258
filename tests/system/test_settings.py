"""Daemons that take their settings from a file and from the environment."""

import sys
from pathlib import Path

import pytest

from cachestore import admin
from cachestore.client import Client
from cachestore.launch import spawn
from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.support.daemons import STORE_LOG, end_store, start_cachestore
from tests.support.engines import ids, start_engine
from tests.support.models import save_tiny_model
from tests.support.parsers import write
from tests.support.waiting import until

MIB = 1 << 20


def budget_of(socket: Path) -> int:
    with Client.connect(socket, role="admin") as client:
        return client.stats().bytes_budget


def test_an_engine_and_the_store_that_it_starts_share_a_file(directory: Path) -> None:
    elsewhere = directory / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    model = save_tiny_model(directory / "model")
    # Ends by itself if this test fails.
    places = {"socket": str(elsewhere / "cachestore.sock"), "log-file": str(elsewhere / "c.log")}
    store = {"budget": "48MiB", "idle-exit": 20, **places}
    engine = {"model": str(model), "cache-codec": "none", "max-batch": 2}
    file = write(directory / "c.toml", engine=engine, cachestore=store)
    environment = {STORE_LOG: ""}
    with start_engine(directory, None, "--config", str(file), environment=environment) as daemon:
        with connect(daemon.listen) as stub:
            until(lambda: stub.GetModel(pb.GetModelRequest()).namespace, "the weights' digest")
            assert stub.GetModel(pb.GetModelRequest()).name == str(model)
            until(lambda: stub.Stats(pb.StatsRequest()).cachestore_connected, "the store")
        daemon.generate(prompt=ids(range(1, 9)), max_tokens=2)
        assert budget_of(elsewhere / "cachestore.sock") == 48 * MIB
        assert not (directory / "cachestore.sock").exists()
    end_store(elsewhere)
    assert "ready at" in (elsewhere / "c.log").read_text()
    assert (elsewhere / "c.crash.log").read_text() == ""


@pytest.mark.skipif(sys.platform == "darwin", reason="no variable moves the folder there")
def test_a_store_that_an_engine_starts_logs_where_a_service_would(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(directory / "model")
    environment = {STORE_LOG: "", "XDG_STATE_HOME": str(directory / "state")}
    with start_engine(directory, model, "--cachestore-budget", "16MiB", environment=environment):
        pass
    end_store(directory)
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    assert admin.main(["service", "logs", "--only", "cachestore"]) == 0
    assert "ready at" in capsys.readouterr().out


def test_a_store_is_set_up_by_its_environment(directory: Path) -> None:
    environment = {"MLX_CACHESTORE_CACHESTORE_BUDGET": "32MiB"}
    with start_cachestore(directory, environment=environment, budget=None) as daemon:
        assert daemon.stats().bytes_budget == 32 * MIB


def test_what_an_engine_says_of_the_store_that_it_starts_counts_before_the_file(
    directory: Path,
) -> None:
    file = write(directory / "c.toml", cachestore={"budget": "48MiB", "log-level": "debug"})
    spawn(directory / "cachestore.sock", "32MiB", 20, directory / "c.log", config=file)
    assert budget_of(directory / "cachestore.sock") == 32 * MIB
    end_store(directory)
