"""Flags of `engine serve` that would have no effect, or cannot have one: errors, never ignored."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cachestore import endpoint
from engine import backend, cli, config
from engine.assembly import Engine
from engine.backend import Backend, BackendError
from engine.config import EngineConfig, Listen, parse_listen
from engine.flags import ConfigError
from engine.kv import layout
from engine.kv.codec import CODECS
from engine.kv.recurrent import RecurrentCache
from tests.support.models import gpt_bigcode_config, mamba2_config, save_tiny_model

NOWHERE = "unix:/tmp/nobody-is-here.sock"


@pytest.mark.parametrize(
    ("flags", "named", "instead"),
    [
        ("--cachestore-budget much", "--cachestore-budget", "8GiB"),
        ("--cachestore-budget 15MiB", "--cachestore-budget", "at least 16MiB"),
        ("--cachestore-budget 900TiB", "--cachestore-budget", "this machine's memory"),
        ("--cachestore off --cachestore-budget 1GiB", "--cachestore-budget", "leave it out"),
        ("--cachestore off --idle-exit 5", "--idle-exit", "leave it out"),
        ("--cachestore off --cache-codec q8", "--cache-codec", "leave it out"),
        ("--cachestore off --cache-min-quantize-tokens 0", "--cache-min-quantize-tokens", "leave"),
        ("--cachestore off --checkpoint-stride 512", "--checkpoint-stride", "leave it out"),
        ("--checkpoint-stride 255", "--checkpoint-stride", "at least 256"),
        ("--checkpoint-stride 0", "--checkpoint-stride", "between 1"),
        (f"--cachestore {NOWHERE} --cachestore-budget 1GiB", "--cachestore-budget", "leave"),
        (f"--cachestore {NOWHERE} --idle-exit 5", "--idle-exit", "leave it out"),
        ("--cachestore maybe", "--cachestore", "auto, off and unix:PATH"),
        ("--cachestore unix:", "--cachestore", "not a path"),
        ("--cache-codec q9", "--cache-codec", "none, q8, q4"),
        ("--cache-codec=", "--cache-codec", "none, q8, q4"),
        (
            "--cache-codec none --cache-min-quantize-tokens 5",
            "--cache-min-quantize-tokens",
            "leave it out",
        ),
        ("--cachestore off --kv-rotate", "--kv-rotate", "leave it out"),
        ("--cache-codec none --kv-rotate", "--kv-rotate", "leave it out"),
        ("--cache-codec turbo3 --kv-rotate", "--kv-rotate", "rotates already; leave it out"),
        ("--turbo-keep-first 4", "--turbo-keep-first", "--cache-codec turbo1 to turbo4"),
        ("--cache-codec k8v4 --turbo-keep-first 0", "--turbo-keep-first", "turbo1 to turbo4"),
        ("--cache-codec turbo3 --turbo-keep-first -1", "--turbo-keep-first", "between 0"),
        ("--idle-exit 0", "--idle-exit", "seconds above 0"),
        ("--idle-exit soon", "--idle-exit", "number of seconds"),
        ("--max-batch 0", "--max-batch", "between 1"),
        ("--prefill-step 0", "--prefill-step", "between 1"),
        ("--wired-limit some", "--wired-limit", "8GiB"),
        ("--drain-seconds -1", "--drain-seconds", "between 0"),
        ("--stall-seconds 0", "--stall-seconds", "between 1"),
        ("--log-file /nowhere/x.log", "--log-file", "No such file"),
        ("--log-format xml", "--log-format", "plain"),
        ("--log-prompts --log-level warning", "--log-prompts", "leave it out"),
        ("--log-prompts --no-log-requests", "--log-prompts", "leave it out"),
        ("--listen=", "--listen", "unix:PATH"),
        ("--frobnicate", "--frobnicate", "no such flag"),
    ],
)
def test_a_flag_that_would_do_nothing_is_one_line(
    capsys: pytest.CaptureFixture[str],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    named: str,
    instead: str,
) -> None:
    monkeypatch.setenv("MLX_CACHESTORE_RUNTIME_DIR", str(directory))
    # In this process MLX is imported already.
    monkeypatch.setattr(backend, "prepare", lambda: None)
    monkeypatch.setattr("engine.signals.interrupt", lambda: None)
    try:
        code = cli.main(["serve", "--model", "no/such/folder", *flags.split()])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert named in said
    assert instead in said
    assert list(directory.iterdir()) == []


def test_an_address_that_another_has_is_refused_before_mlx_is_loaded(
    capsys: pytest.CaptureFixture[str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "prepare", lambda: pytest.fail("MLX is loaded"))
    monkeypatch.setattr("engine.signals.interrupt", lambda: None)
    path = directory / "engine.sock"
    lock = endpoint.Lock(path, flag="--listen")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        for listen, why in (
            (f"unix:{path}", f"--listen: {path} is in use by process {os.getpid()}: use that"),
            (f"127.0.0.1:{port}", f"--listen 127.0.0.1:{port}: cannot be bound"),
        ):
            assert cli.main(["serve", "--model", "m", "--listen", listen]) == 2
            assert why in capsys.readouterr().err
    lock.release()
    assert list(directory.iterdir()) == []


def failure(settings: EngineConfig) -> str:
    """With what this engine does not start."""
    engine = Engine(settings)
    try:
        with pytest.raises((ConfigError, BackendError)) as raised:
            engine.start()
    finally:
        engine.stop()
    return str(raised.value)


def settings(model: Path, **fields: object) -> EngineConfig:
    return EngineConfig(str(model), Listen(None, "127.0.0.1:0"), NOWHERE, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field",
    [{"cache_codec": "q8"}, {"cache_min_quantize_tokens": 0}, {"checkpoint_stride": 512}],
)
def test_how_to_store_is_refused_where_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: dict[str, object]
) -> None:
    monkeypatch.delitem(layout.STATE_KINDS, RecurrentCache)
    model = save_tiny_model(tmp_path / "model", mamba2_config())
    (name,) = field
    flag = "--" + name.replace("_", "-")
    assert re.match(
        rf"{flag} .*not cached.*Recurrent.*leave it out", failure(settings(model, **field))
    )


def test_a_stride_is_refused_where_no_checkpoint_is_taken(tmp_path: Path) -> None:
    said = failure(settings(save_tiny_model(tmp_path / "model"), checkpoint_stride=512))
    assert re.match("--checkpoint-stride .*cut at any token; leave it out", said)


def test_more_rows_than_the_model_can_run_are_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", gpt_bigcode_config())
    assert "--max-batch 2: this model runs one request" in failure(settings(model, max_batch=2))
    engine = Engine(settings(model, max_batch=1))
    engine.start()
    engine.stop()


@pytest.mark.parametrize(
    ("device", "wired_bytes", "said"),
    [
        (Backend("cpu", "a CPU", None), 1, "--wired-limit .*leave it out"),
        (Backend("cuda", "a card", 8 << 30), 1, "--wired-limit .*leave it out"),
        (Backend("metal", "Apple M4", 8 << 30), (8 << 30) + 1, f"--wired-limit .*{8 << 30}"),
    ],
)
def test_memory_that_cannot_be_wired_is_refused(
    device: Backend, wired_bytes: int, said: str
) -> None:
    with pytest.raises(BackendError, match=said):
        backend.memory_limits(device, wired_bytes)


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal has a limit")
def test_the_device_is_asked_before_the_model_is_loaded(tmp_path: Path) -> None:
    assert "--wired-limit" in failure(settings(tmp_path / "no-model", wired_limit_bytes=1))


def test_every_codec_has_its_name_in_the_help() -> None:
    assert tuple(CODECS) == config.CACHE_CODECS


def test_defaults_are_stated_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for default in (
        config.MAX_BATCH_DEFAULT,
        config.IDLE_EXIT_SECONDS_DEFAULT,
        config.CACHE_CODEC_DEFAULT,
        config.MIN_QUANTIZE_TOKENS_DEFAULT,
        config.CHECKPOINT_STRIDE_DEFAULT,
    ):
        assert re.search(rf"\([^()]*default: {default}", said)
    unsaid = EngineConfig("m", parse_listen("127.0.0.1:0"))
    assert unsaid.codec == config.CACHE_CODEC_DEFAULT
    assert unsaid.min_quantize_tokens == config.MIN_QUANTIZE_TOKENS_DEFAULT
    assert unsaid.stride == config.CHECKPOINT_STRIDE_DEFAULT


# A library that MLX needs is not there, as on a machine with mlx-cuda and no driver.
WITHOUT_DRIVER = """
import sys
from engine import backend, cli
backend.prepare = lambda: None
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            raise ImportError("libcuda.so.1: cannot open shared object file")
sys.meta_path.insert(0, Broken())
sys.exit(cli.main(["serve", "--model", "x"]))
"""


def test_an_mlx_that_does_not_load_is_an_error_in_one_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_CACHESTORE_RUNTIME_DIR", str(directory))
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRIVER], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert re.match(r"error: MLX does not load: libcuda\.so\.1: .*cpu.*\n$", result.stderr)
