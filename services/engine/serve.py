"""`engine serve`: its flags, and what they come to."""

import argparse
import os
from pathlib import Path

from rich.console import Console

from cachestore import budget, endpoint
from engine import backend, config, kvconfig, signals
from engine.config import EngineConfig, Listen, parse_listen
from engine.flags import ConfigError, whole
from engine.kvconfig import KvConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help="folder, Hugging Face id, or the alias smollm2"
    )
    parser.add_argument(
        "--adapter-path", type=Path, metavar="FOLDER", help="LoRA adapter, as mlx-lm writes them"
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="unix:PATH or HOST:PORT of the loopback interface "
        "(default: engine.sock in the user's runtime directory)",
    )
    parser.add_argument(
        "--max-batch",
        type=whole(1),
        metavar="ROWS",
        help=f"requests at once (default: {config.MAX_BATCH_DEFAULT}, or 1 where the model "
        "cannot do more)",
    )
    parser.add_argument(
        "--prefill-step",
        type=whole(1),
        metavar="TOKENS",
        help="prompt tokens in one forward at most (default: measured for the backend, which "
        "also keeps the lower limit while other requests decode)",
    )
    parser.add_argument(
        "--wired-limit",
        metavar="BYTES",
        help="macOS: memory that MLX may wire (default: 0; see docs/verify-on-mac.md)",
    )
    _add_kv_flags(parser)
    _add_cache_flags(parser)
    parser.set_defaults(run=run)


def _add_kv_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-bits",
        type=kvconfig.read_bits,
        metavar="none|N|K,V",
        help="quantize live caches: bits of keys and values, or of keys and of values "
        f"({', '.join(map(str, kvconfig.AFFINE_BITS))}; default: none, full precision). The store "
        "keeps the same bytes",
    )
    parser.add_argument(
        "--kv-group-size",
        type=whole(1),
        metavar="N",
        help="with --kv-bits: elements that share a scale: 32, 64 or 128 "
        f"(default: {kvconfig.GROUP_SIZE_DEFAULT})",
    )
    parser.add_argument(
        "--kv-rotate",
        action="store_true",
        help="rotate rows before they are quantized, live with --kv-bits, or else by the codec of "
        "the store (q8, q4, k8v4): the same bytes, far less error where a few channels are much "
        "larger than the others",
    )
    parser.add_argument(
        "--quantized-kv-start",
        type=whole(0),
        default=0,
        metavar="TOKENS",
        help="with --kv-bits and --max-batch 1: quantize a cache once it has so many tokens "
        "(default: 0, from the first)",
    )
    parser.add_argument(
        "--max-kv-size",
        type=whole(1),
        metavar="TOKENS",
        help=f"bound plain layers to the first {kvconfig.WINDOW_KEEP} and the latest tokens, so "
        "many in all (default: no bound); such caches are not stored yet",
    )


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cachestore",
        default="auto",
        metavar="auto|off|unix:PATH",
        help="auto (default): the user's running cachestore, or start one that outlives the engine",
    )
    parser.add_argument(
        "--cachestore-budget", metavar="BYTES", help="budget of a cachestore that auto starts"
    )
    parser.add_argument(
        "--idle-exit",
        type=whole(1),
        metavar="SECONDS",
        help="a cachestore that auto starts ends after this long without an engine "
        f"(default: {config.IDLE_EXIT_SECONDS_DEFAULT})",
    )
    parser.add_argument(
        "--cache-codec",
        metavar="CODEC",
        help=f"codec of stored rows: {', '.join(config.CACHE_CODECS)} "
        f"(default: {config.CACHE_CODEC_DEFAULT}). none is lossless; k8v4 has keys of 8 and values "
        "of 4 bits; q4 takes half of q8, with an error that changes replies, and so do the turbo "
        "codecs, of 1 to 4 bits",
    )
    parser.add_argument(
        "--cache-min-quantize-tokens",
        type=whole(0),
        metavar="N",
        help="store sequences shorter than this without loss "
        f"(default: {config.MIN_QUANTIZE_TOKENS_DEFAULT})",
    )
    parser.add_argument(
        "--turbo-keep-first",
        type=whole(0),
        metavar="K",
        help="with a turbo codec: store the first K tokens of every sequence without loss "
        "(default: 0)",
    )


def settings_of(flags: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError and EndpointError."""
    kv = KvConfig(
        bits=flags.kv_bits,
        group_size=flags.kv_group_size,
        quantized_start=flags.quantized_kv_start,
        max_size=flags.max_kv_size,
    )
    return EngineConfig(
        kv=kv,
        model=flags.model,
        listen=_listen(flags.listen),
        adapter=flags.adapter_path,
        cachestore=flags.cachestore,
        cachestore_budget_bytes=_budget_bytes(flags.cachestore_budget),
        idle_exit_seconds=flags.idle_exit,
        cache_codec=flags.cache_codec,
        cache_min_quantize_tokens=flags.cache_min_quantize_tokens,
        kv_rotate=flags.kv_rotate,
        turbo_keep_first=flags.turbo_keep_first,
        max_batch=flags.max_batch,
        prefill_step=flags.prefill_step,
        wired_limit_bytes=_wired_limit_bytes(flags.wired_limit),
    )


def run(flags: argparse.Namespace) -> int:
    """Serve; the exit code. Raises ConfigError and EndpointError."""
    settings = settings_of(flags)
    signals.interrupt()
    try:
        return _serve(settings)
    except signals.Interrupted as interrupted:
        Console(stderr=True).show_cursor()  # the progress bar of a download hides it
        os._exit(signals.exit_code(interrupted.number))


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


def _budget_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return budget.parse_budget(text, budget.physical_memory_bytes())
    except ValueError as error:
        raise ConfigError(f"--cachestore-budget: {error}") from None


def _wired_limit_bytes(text: str | None) -> int:
    if text is None:
        return 0
    try:
        return budget.parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--wired-limit: {error}") from None
