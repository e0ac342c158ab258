"""`engine serve`: its flags, and what they come to."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cachestore import endpoint, logs
from cachestore import serve as store
from cachestore.flags import (
    add_metrics,
    add_reflection,
    cachestore_socket,
    seconds,
    size,
    store_budget,
    whole,
)
from engine import backend, binding, config, kvflags, signals
from engine.config import EngineConfig, Listen, parse_listen
from engine.flags import ConfigError, model_name

TABLE = "engine"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=model_name,
        required=True,
        help="a folder, a Hugging Face id, or smollm2, which needs no hub",
    )
    parser.add_argument(
        "--adapter-path",
        type=Path,
        metavar="FOLDER",
        help="LoRA adapter, as mlx-lm writes them (default: none)",
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="unix:PATH or HOST:PORT of the loopback interface "
        "(default: engine.sock in the runtime directory)",
    )
    parser.add_argument(
        "--prefill-step",
        type=whole(1),
        metavar="TOKENS",
        help="prompt tokens in one forward at most; the lower limit of the backend while other "
        "requests decode stays (default: measured for the backend)",
    )
    parser.add_argument(
        "--wired-limit",
        type=size,
        metavar="BYTES",
        help="macOS: memory that MLX may wire, like 8GiB; see docs/verify-on-mac.md (default: 0)",
    )
    add_metrics(parser)
    _add_store_flags(parser)
    kvflags.add_flags(parser)
    _add_life_flags(parser)
    parser.set_defaults(run=run)


def _add_life_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drain-seconds",
        type=whole(0, 3600),
        default=config.DRAIN_SECONDS_DEFAULT,
        metavar="N",
        help="after SIGTERM: for running replies to end and rows to be stored (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--stall-seconds",
        type=whole(1, 86400),
        default=config.STALL_SECONDS_DEFAULT,
        metavar="N",
        help="health is NOT_SERVING, and the systemd watchdog not fed, while one step takes longer "
        "than this (default: %(default)s)",
    )
    add_reflection(parser)
    parser.add_argument(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        help="a line in the log for each request when it ends (default: yes)",
    )
    parser.add_argument(
        "--log-prompts",
        action=argparse.BooleanOptionalAction,
        help="prompts and replies in the line that is logged of each request (default: no)",
    )
    logs.add_flags(parser)


def _add_store_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cachestore",
        default="auto",
        metavar="auto|off|unix:PATH",
        help="auto: the user's running cachestore, or start one that outlives the engine; off: "
        "nothing is cached; unix:PATH: one that others start (default: auto)",
    )
    parser.add_argument(
        "--cachestore-budget",
        type=store_budget,
        metavar="BYTES",
        help="budget of a cachestore that auto starts, like 8GiB (default: an eighth of the "
        "machine's memory, unless [cachestore] says otherwise)",
    )
    parser.add_argument(
        "--idle-exit",
        type=seconds,
        metavar="SECONDS",
        help="a cachestore that auto starts ends after this long without an engine (default: "
        f"{config.IDLE_EXIT_SECONDS_DEFAULT}, unless [cachestore] says otherwise)",
    )


def settings_of(flags: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError and EndpointError."""
    settings = EngineConfig(
        model=flags.model,
        listen=_listen(flags.listen),
        adapter=flags.adapter_path,
        cachestore=flags.cachestore,
        cachestore_budget_bytes=flags.cachestore_budget,
        idle_exit_seconds=flags.idle_exit,
        prefill_step=flags.prefill_step,
        wired_limit_bytes=flags.wired_limit or 0,
        drain_seconds=flags.drain_seconds,
        stall_seconds=flags.stall_seconds,
        reflection=bool(flags.reflection),
        log_requests=flags.log_requests is not False,
        log_prompts=_log_prompts(flags),
        metrics=flags.metrics,
        **kvflags.settings_of(flags),
    )
    return _with_store(settings, flags.config) if settings.cachestore == "auto" else settings


def _with_store(settings: EngineConfig, file: Path | None) -> EngineConfig:
    """The engine's flags, and what else the user's settings say of the store that `auto` means.
    Raises ConfigError: a store that is asked to start later could only be a warning."""
    said = store.settings_without_flags(file)
    try:
        socket = None if said.socket is None else cachestore_socket(said.socket)
    except endpoint.EndpointError as error:
        raise ConfigError(said.origins.told(error)) from None
    idle_exit = settings.idle_exit_seconds or said.idle_exit
    return replace(
        settings,
        idle_exit_seconds=idle_exit,
        cachestore_socket=socket,
        cachestore_log=logs.config_of(said, store.TABLE).file,
        config_file=file,
    )


def run(flags: argparse.Namespace) -> int:
    """Serve; the exit code. Raises ConfigError and EndpointError."""
    settings = settings_of(flags)
    signals.interrupt()
    try:
        # Before MLX, whose import takes seconds: where another engine serves, this one does not.
        with binding.reserved(settings.listen):
            return _serve(settings)
    except signals.Leave as leave:
        Console(stderr=True).show_cursor()  # the progress bar of a download hides it
        os._exit(leave.exit_code)


def _serve(settings: EngineConfig) -> int:
    try:
        backend.prepare()
        backend.load()
    except backend.BackendError as error:
        raise ConfigError(str(error)) from None
    # Only now: MLX must not be imported before its BLAS is there.
    from engine import server  # noqa: PLC0415
    from engine.kv.attention_check import AttentionCheckFailed  # noqa: PLC0415
    from engine.kv.codec import CodecError  # noqa: PLC0415
    from engine.model import ModelError  # noqa: PLC0415
    from engine.selfcheck import SelfCheckFailed  # noqa: PLC0415

    try:
        return server.run(settings)
    except (
        *(backend.BackendError, ModelError, CodecError),
        *(SelfCheckFailed, AttentionCheckFailed),
    ) as error:
        raise ConfigError(str(error)) from None


def _listen(text: str | None) -> Listen:
    return parse_listen(f"unix:{endpoint.engine_socket()}" if text is None else text)


def _log_prompts(flags: argparse.Namespace) -> bool:
    if flags.log_prompts and flags.log_level not in ("debug", "info"):
        raise ConfigError(
            f"--log-prompts would have no effect: with --log-level {flags.log_level} no request "
            "is logged; leave it out"
        )
    if flags.log_prompts and flags.log_requests is False:
        raise ConfigError("--log-prompts would have no effect with --no-log-requests; leave it out")
    return bool(flags.log_prompts)
