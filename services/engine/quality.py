"""`engine quality`: what each codec does to a model's predictions, on a real text."""

import argparse
import itertools
import logging
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachestore.flags import whole
from engine import backend, kvconfig, report
from engine.config import PREFILL_STEPS, TURBO_CODECS
from engine.flags import ConfigError, model_name
from engine.kvconfig import KvConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from engine.kv.codec import CodecPlan
    from engine.model import LoadedModel
    from engine.scoring import Policy, Score, Window

# Jane Austen, Northanger Abbey (1818), chapters 1 to 6: in the public domain.
TEXT_DEFAULT: Final = "northanger_abbey.txt"
PREFIX_DEFAULT: Final = 512
SCORED_DEFAULT: Final = 128
WINDOWS_DEFAULT: Final = 24
KV_BITS_DEFAULT: Final = ((8, 8), (4, 4), (8, 4))


def _kl(row: "Score") -> str:
    error = "" if row.kl_error is None else f" ± {row.kl_error:.1g}"
    return f"{row.mean_kl:.2g}{error}"


COLUMNS: Final[report.Columns] = {
    "cache": lambda row: row.policy,
    "bytes/token": lambda row: f"{row.bytes_per_token:,.0f}",
    "ratio": lambda row: f"{row.ratio:.2f}",
    "perplexity": lambda row: f"{row.perplexity:.4f}",
    "mean KL": _kl,
    "top token flips": lambda row: f"{100 * row.flip_rate:.2f} %",
}

DESCRIPTION: Final = """\
How much worse a model predicts behind rows that were stored with a codec. Windows of a text are
computed in full precision, packed into records, attached as a hit is, and the next tokens are
scored behind them.

perplexity        of the scored tokens
mean KL           divergence from full precision, nats for each token, with its standard error
top token flips   part of tokens for which another next token is the most likely
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=model_name, required=True, help="as in `engine serve`")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text (default: six chapters of Northanger Abbey, which are included)",
    )
    report.add_codec_flag(parser)
    parser.add_argument(
        "--kv-bits",
        type=kvconfig.read_bits,
        action="append",
        default=[],
        metavar="N|K,V",
        help="a quantized live cache beside the codecs of the store; may be repeated "
        "(default: 8, 4 and 8,4, unless codecs are asked for)",
    )
    parser.add_argument(
        "--kv-rotate", action="store_true", help="each --kv-bits once more, its rows rotated"
    )
    parser.add_argument(
        "--turbo-keep-first",
        type=whole(1),
        metavar="K",
        help="each turbo codec once more, with the first K tokens stored without loss",
    )
    counts = (
        ("--prefix", PREFIX_DEFAULT, "tokens that are stored and attached in each window"),
        ("--scored", SCORED_DEFAULT, "tokens that are predicted in each window"),
        ("--windows", WINDOWS_DEFAULT, "windows at most, spread over the text"),
    )
    for flag, default, what in counts:
        parser.add_argument(
            flag,
            type=whole(1, 1 << 20),
            default=default,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    report.add_flags(parser)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Measure and publish; the exit code. Raises ConfigError and BackendError."""
    report.check(flags)
    text = _read(flags.text)
    backend.prepare()
    backend.load()
    # Only now: MLX must not be imported before its BLAS is there.
    from engine import scoring  # noqa: PLC0415
    from engine.kv.kinds import NotCacheable  # noqa: PLC0415
    from engine.kv.layout import probe  # noqa: PLC0415
    from engine.kv.live import LiveCaches  # noqa: PLC0415
    from engine.kv.names import plans_of  # noqa: PLC0415
    from engine.model import ModelError, ModelSpec, load  # noqa: PLC0415

    device = backend.describe()
    backend.apply_memory_limits(backend.memory_limits(device))
    try:
        loaded = load(ModelSpec(flags.model), device)
        live = LiveCaches(loaded.model)
        layout = probe(live)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    except NotCacheable as error:
        raise ConfigError(f"--model {flags.model}: cannot be measured: {error}") from None
    policies = _store_policies(flags, plans_of(flags.codec, layout, report.CODEC_FLAG))
    step = PREFILL_STEPS[device.name].idle
    policies += _live_policies(flags, loaded, device.name, step)
    windows = _windows(flags, loaded, text)
    with report.progress("scoring", len(windows)) as advance:
        scores = scoring.score(live, layout, windows, policies, step, advance)
    report.publish(flags, _title(flags.model, scores[0]), COLUMNS, scores, draw)
    return 0


def _store_policies(flags: argparse.Namespace, plans: "Mapping[str, CodecPlan]") -> "list[Policy]":
    """Raises ConfigError when tokens are to be kept and no codec keeps any."""
    from engine.scoring import StorePolicy  # noqa: PLC0415
    from engine.shelf import always  # noqa: PLC0415

    policies: list[Policy] = []
    keep_first = flags.turbo_keep_first
    if keep_first and not plans.keys() & set(TURBO_CODECS):
        raise ConfigError(
            "--turbo-keep-first: no turbo codec is scored; add --codec turbo3, or leave it out"
        )
    for name, plan in plans.items():
        policies.append(StorePolicy(name, always(plan)))
        if keep_first and name in TURBO_CODECS:
            policies.append(
                StorePolicy(f"{name}, first {keep_first} kept", always(plan, keep_first))
            )
    return policies


def _live_policies(
    flags: argparse.Namespace, loaded: "LoadedModel", device: backend.Name, step: int
) -> "list[Policy]":
    """`step`: prompt tokens of one forward. Raises ConfigError when bits were asked for that this
    model cannot have."""
    from engine import scoring  # noqa: PLC0415
    from engine.kv import start  # noqa: PLC0415
    from engine.kv.attention_check import AttentionCheckFailed  # noqa: PLC0415
    from engine.kv.layout import probe  # noqa: PLC0415

    policies: list[Policy] = []
    asked = flags.kv_bits or ([] if flags.codec else KV_BITS_DEFAULT)
    if flags.kv_rotate and not asked:
        raise ConfigError("--kv-rotate: no --kv-bits is scored; add --kv-bits 4, or leave it out")
    for bits, rotate in itertools.product(asked, (False, True) if flags.kv_rotate else (False,)):
        if bits is None:
            raise ConfigError("--kv-bits none: full precision is always scored; leave it out")
        try:
            caches = start.live_caches(loaded.model, KvConfig(bits), rotate, device)
        except AttentionCheckFailed as error:
            raise ConfigError(f"--kv-bits: {error}") from None
        except ConfigError:
            if flags.kv_bits or rotate:
                raise
            continue
        name = f"kv-bits {bits[0]},{bits[1]}" + rotate * " rotated"
        policies.append(scoring.LivePolicy(name, caches, probe(caches), step))
    return policies


def _read(path: Path | None) -> str:
    source = resources.files("engine") / TEXT_DEFAULT if path is None else path
    try:
        return source.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--text {path}: not UTF-8") from None


def _windows(flags: argparse.Namespace, loaded: "LoadedModel", text: str) -> "list[Window]":
    from engine import scoring  # noqa: PLC0415
    from engine.tokenizer import PromptEncoder  # noqa: PLC0415

    longest = flags.prefix + 1 + flags.scored
    if longest > loaded.context_tokens:
        raise ConfigError(
            f"--prefix {flags.prefix} and --scored {flags.scored}: more than the model's "
            f"{loaded.context_tokens} tokens; use fewer"
        )
    # A text may be longer than the model's context: only windows of it are fed.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        ids = PromptEncoder(loaded.tokenizer, loaded.vocabulary_tokens).encode_text(text)
    except ValueError as error:
        raise ConfigError(f"--text: {error}") from None
    # What the model wants before any text, as its tokenizer adds it.
    begin = list(loaded.tokenizer.encode(""))
    begin = begin if ids[: len(begin)] == begin else []
    windows = scoring.cut(begin, ids[len(begin) :], flags.prefix, flags.scored, flags.windows)
    if not windows:
        raise ConfigError(
            f"--text: {len(ids)} tokens, fewer than the {longest} of one window; use a longer one, "
            "or a smaller --prefix and --scored"
        )
    return windows


def _title(model: str, full: "Score") -> str:
    return (
        f"{model} behind prefixes of {full.prefix_tokens} tokens, cache in {full.dtype}: "
        f"{full.tokens:,} tokens in {full.windows} windows"
    )


def draw(figure: "Figure", rows: "Sequence[Score]") -> None:
    """Divergence and flips by size."""
    from engine.scoring import FULL  # noqa: PLC0415

    by_kl, by_flips = figure.subplots(1, 2)
    for number, row in enumerate(rows):
        if row.policy == FULL:
            continue
        colour = f"C{number}"
        report.mark(by_kl, row.bytes_per_token, row.mean_kl, row.policy, colour)
        report.mark(by_flips, row.bytes_per_token, 100 * row.flip_rate, row.policy, colour)
    for axes, label in ((by_kl, "mean KL, nats"), (by_flips, "top token flips, %")):
        axes.set(xlabel="bytes per token", ylabel=label)
        axes.set_xlim(0, 1.2 * max(row.bytes_per_token for row in rows))
        axes.grid(alpha=0.3)
