"""An engine that starts where something is wrong, or that is told to end before it serves."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from cachestore import variables
from engine import signals
from engine.config import parse_listen
from engine.remote import connect, model_of
from engine.v1 import engine_pb2 as pb
from tests.support.daemons import own_places, start_cachestore
from tests.support.engines import ids, is_serving, start_engine
from tests.support.models import save_tiny_model
from tests.support.waiting import until


@contextlib.contextmanager
def serving(
    directory: Path, *flags: str, **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """`engine serve` in a process of its own, whatever comes of it; its log is engine.log."""
    with (directory / "engine.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **own_places(directory), **environment},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def refusal(directory: Path, *flags: str) -> str:
    """What an engine that does not start says."""
    with serving(directory, *flags) as process:
        assert process.wait(60) == 2
    said = (directory / "engine.log").read_text()
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def assert_ends(directory: Path, process: "subprocess.Popen[bytes]", number: int) -> None:
    process.send_signal(number)
    began = time.monotonic()
    assert process.wait(20) == 0
    assert time.monotonic() - began < 2
    assert "Traceback" not in (directory / "engine.log").read_text()
    assert not list(directory.glob("engine.sock*"))


@pytest.mark.parametrize("number", signals.ENDING)
def test_a_signal_ends_a_download_and_its_pip(directory: Path, number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        environment = {
            variables.CACHE_DIR: str(directory / "cache"),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_NO_INDEX": "0",
            "no_proxy": "*",
        }
        with serving(directory, "--model", "smollm2", **environment) as process:
            pip, _ = index.accept()
            with pip:
                pip.settimeout(10)
                assert pip.recv(1)
                assert_ends(directory, process, number)
                while pip.recv(1 << 16):  # until nobody holds the other end
                    pass


@dataclass
class Loading:
    """An engine that has begun to load a model, and ends that when `finish` is called."""

    process: "subprocess.Popen[bytes]"
    file: Path
    writer: int

    def finish(self) -> None:
        self.file.unlink()
        self.file.write_text("{}")  # for who reads it again
        os.write(self.writer, b"{}")
        self.close()

    def close(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
        self.writer = -1


@contextlib.contextmanager
def loading(directory: Path) -> Iterator[Loading]:
    model = save_tiny_model(directory / "model")
    # Whoever reads it waits until somebody writes.
    endless = model / "generation_config.json"
    os.mkfifo(endless)

    def opened() -> int:
        try:
            return os.open(endless, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return 0

    with serving(directory, "--model", str(model), "--cachestore", "off") as process:
        begun = Loading(process, endless, until(opened, "the load", seconds=60))
        try:
            yield begun
        finally:
            begun.close()


@pytest.mark.parametrize("number", signals.ENDING)
def test_a_signal_ends_a_load(directory: Path, number: int) -> None:
    with loading(directory) as engine:
        assert_ends(directory, engine.process, number)


def test_who_comes_while_it_loads_is_told_so(directory: Path) -> None:
    listen = parse_listen(f"unix:{directory / 'engine.sock'}")
    with loading(directory) as engine, connect(listen) as stub:
        assert not is_serving(listen)
        calls = (
            lambda: list(stub.Generate(pb.GenerateRequest(prompt=ids([1])))),
            lambda: stub.Warm(pb.WarmRequest(prompt=ids([1]))),
            lambda: stub.Tokenize(pb.TokenizeRequest(prompt=ids([1]))),
            lambda: stub.GetModel(pb.GetModelRequest()),
            lambda: stub.Stats(pb.StatsRequest()),
        )
        for call in calls:
            with pytest.raises(grpc.RpcError, match="the engine is loading its model") as refused:
                call()
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert_ends(directory, engine.process, signal.SIGTERM)


def test_a_chat_waits_for_an_engine_that_loads(directory: Path) -> None:
    with loading(directory) as engine:
        chat = subprocess.Popen(
            [sys.executable, "-m", "engine", "chat", "--max-tokens", "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **own_places(directory)},
        )
        assert chat.stderr is not None
        assert "is still loading its model; waiting for it" in chat.stderr.readline()
        engine.finish()
        _, said = chat.communicate("Hello\n", timeout=60)
        assert chat.returncode == 0
        assert "prompt tokens" in said
        assert engine.process.poll() is None  # it was this one that answered


def test_whoever_asks_twice_does_not_wait_for_the_drain(directory: Path) -> None:
    model = save_tiny_model(directory / "model")
    with (
        start_engine(directory, model, "--cachestore", "off") as engine,
        connect(engine.listen) as stub,
    ):
        request = pb.GenerateRequest(prompt=ids([1, 2]), max_tokens=2000, ignore_eos=True)
        stream = stub.Generate(request)
        next(stream)
        engine.process.send_signal(signal.SIGINT)

        def draining() -> bool:
            try:
                next(stub.Generate(pb.GenerateRequest(prompt=ids([1, 2]), max_tokens=1)))
            except grpc.RpcError:
                return True
            return False

        until(draining, "the drain")
        assert engine.process.poll() is None
        engine.process.send_signal(signal.SIGINT)
        assert engine.process.wait(5) == 130


def test_a_taken_port_is_noticed_before_the_model_is_loaded(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(directory, "--model", "no/such/folder", "--listen", address)
    assert f"--listen {address}: cannot be bound" in said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--model", "no/such/folder"), "--model no/such/folder"),
        (("--model", "/" + 300 * "x"), "--model /xxx"),
        (("--model", "{model}", "--adapter-path", "/no/such/adapter"), "--adapter-path /no/such"),
    ],
)
def test_a_model_that_is_not_there_starts_no_store(
    directory: Path, flags: tuple[str, ...], named: str
) -> None:
    model = save_tiny_model(directory / "model")
    assert named in refusal(directory, *(flag.format(model=model) for flag in flags))
    assert not list(directory.glob("cachestore*"))


def test_a_model_that_is_not_cached_starts_no_store(directory: Path) -> None:
    model = save_tiny_model(directory / "model")
    late = ("--kv-bits", "8", "--quantized-kv-start", "40", "--max-batch", "1")
    with start_engine(directory, model, *late) as engine:
        assert engine.generate(prompt=ids([1, 2, 3]), max_tokens=2)[0]
        assert not list(directory.glob("cachestore*"))


def test_a_budget_that_the_running_store_does_not_have_is_said(directory: Path) -> None:
    model = save_tiny_model(directory / "model")
    with start_cachestore(directory, budget="64MiB"):
        for budget, warned in (("64MiB", False), ("32MiB", True)):
            with start_engine(directory, model, "--cachestore-budget", budget, name=budget):
                pass
            log = (directory / f"{budget}.log").read_text()
            assert ("WARNING" in log and "not of the 33554432 that" in log) == warned


def test_the_socket_is_private_whatever_the_umask(directory: Path) -> None:
    model = save_tiny_model(directory / "model")
    umask = os.umask(0)
    try:
        with start_engine(directory, model, "--cachestore", "off") as engine:
            assert engine.listen.unix_path is not None
            for path in (engine.listen.unix_path, directory / "engine.sock.lock"):
                assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    finally:
        os.umask(umask)


def test_code_in_the_working_directory_is_not_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(directory / "model")
    here = directory / "here"
    here.mkdir()
    for name in ("grpc", "engine", "tempfile"):
        (here / f"{name}.py").write_text("raise SystemExit('code of a stranger')")
    monkeypatch.chdir(here)
    with start_engine(directory, Path("../model"), "--cachestore", "off") as engine:
        assert engine.generate(prompt=ids([1, 2, 3]), max_tokens=2)[0]
    assert model.is_dir()


def test_a_proxy_is_not_asked_for_a_local_address(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(directory / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    flags = ("--model", str(model), "--listen", address, "--cachestore", "off")
    with serving(directory, *flags):
        until(lambda: model_of(parse_listen(address)), "the engine", seconds=60)
