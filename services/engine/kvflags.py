"""Flags that say how an engine holds rows, live and in the store: of whatever starts an engine."""

import argparse
import itertools
from collections.abc import Mapping
from typing import Any, Final

from cachestore.flags import Value, whole
from engine import config, kvconfig
from engine.config import EngineConfig, Listen
from engine.flags import ConfigError
from engine.kvconfig import KvConfig

# What argparse is told of each. None: the user said nothing.
_FLAGS: Final[Mapping[str, dict[str, Any]]] = {
    "--kv-bits": {
        "type": Value((str, int), kvconfig.read_bits),
        "metavar": "none|N|K,V",
        "help": "quantize live caches: bits of keys and values, or of keys and of values "
        f"({', '.join(map(str, kvconfig.AFFINE_BITS))}); none: full precision. The store keeps the "
        "same bytes (default: none)",
    },
    "--kv-group-size": {
        "type": whole(1),
        "metavar": "N",
        "help": "with --kv-bits: elements that share a scale: 32, 64 or 128 "
        f"(default: {kvconfig.GROUP_SIZE_DEFAULT})",
    },
    "--kv-rotate": {
        "action": argparse.BooleanOptionalAction,
        "help": "rotate rows before they are quantized, live with --kv-bits, or else by the codec "
        "of the store (q8, q4, k8v4): the same bytes, far less error where a few channels are much "
        "larger than the others (default: no)",
    },
    "--quantized-kv-start": {
        "type": whole(0),
        "metavar": "TOKENS",
        "help": "with --kv-bits and --max-batch 1: quantize a cache once it has so many tokens, "
        "but never a model's own windows; 0: all from the first (default: 0)",
    },
    "--max-kv-size": {
        "type": whole(1),
        "metavar": "TOKENS",
        "help": f"bound plain layers to the first {kvconfig.WINDOW_KEEP} and the latest tokens, so "
        "many in all; a model that cannot be bounded is refused (default: no bound)",
    },
    "--cache-codec": {
        "metavar": "CODEC",
        "help": f"codec of stored rows: {', '.join(config.CACHE_CODECS)}. none is lossless; q8 has "
        "8 bits; k8v4 has keys of 8 and values of 4 bits; q4 takes half of q8, with an error that "
        "changes replies, and so do the turbo codecs, TurboQuant of 1 to 4 bits "
        f"(default: {config.CACHE_CODEC_DEFAULT})",
    },
    "--cache-min-quantize-tokens": {
        "type": whole(0),
        "metavar": "N",
        "help": "store sequences shorter than this without loss "
        f"(default: {config.MIN_QUANTIZE_TOKENS_DEFAULT})",
    },
    "--turbo-keep-first": {
        "type": whole(0),
        "metavar": "K",
        "help": "with a turbo codec: store the first K tokens of every sequence without loss "
        "(default: 0)",
    },
    "--checkpoint-stride": {
        "type": whole(1),
        "metavar": "TOKENS",
        "help": "for models with windows or recurrent layers: take a checkpoint of them every so "
        f"many tokens of a prompt, beside those at its messages; at least "
        f"{config.CHECKPOINT_STRIDE_MIN} (default: {config.CHECKPOINT_STRIDE_DEFAULT})",
    },
    "--max-batch": {
        "type": whole(1),
        "metavar": "ROWS",
        "help": "requests at once; 1 where the model cannot do more "
        f"(default: {config.MAX_BATCH_DEFAULT})",
    },
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how an engine that is started holds rows")
    for flag, told in _FLAGS.items():
        group.add_argument(flag, **told)


def settings_of(flags: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig. Raises ConfigError for what cannot be, whatever the model is."""
    kv = KvConfig(
        bits=flags.kv_bits,
        group_size=flags.kv_group_size,
        quantized_start=flags.quantized_kv_start or 0,
        max_size=flags.max_kv_size,
    )
    return {
        "kv": kv,
        "kv_rotate": bool(flags.kv_rotate),
        "cache_codec": flags.cache_codec,
        "cache_min_quantize_tokens": flags.cache_min_quantize_tokens,
        "turbo_keep_first": flags.turbo_keep_first,
        "checkpoint_stride": flags.checkpoint_stride,
        "max_batch": flags.max_batch,
    }


def serve_words(model: str, listen: Listen, flags: argparse.Namespace) -> list[str]:
    """Arguments for `engine serve`, which says what became of flags when some are given. Raises
    ConfigError for what no engine can use."""
    EngineConfig(model, listen, **settings_of(flags))
    given = list(itertools.chain(*_given(flags)))
    level = "info" if given else "warning"
    return ["--model", model, *given, "--log-level", level, "--no-log-requests"]


def refuse(flags: argparse.Namespace, reason: str) -> None:
    """Raises ConfigError when one was given, though for `reason` no engine is started."""
    for flag, *_ in _given(flags):
        raise ConfigError(f"{flag} would have no effect: {reason}; leave it out")


def _given(flags: argparse.Namespace) -> list[list[str]]:
    """Each flag that was given, with its value as it is read."""
    words = []
    for flag in _FLAGS:
        value = getattr(flags, flag.removeprefix("--").replace("-", "_"))
        if isinstance(value, bool):
            words.append([flag if value else flag.replace("--", "--no-", 1)])
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words.append([flag, text])
    return words
