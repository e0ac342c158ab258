"""`engine bench-kv`: what each codec does to rows of a cache, on random rows."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from cachestore.flags import whole
from engine import backend, report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from engine.trial import Found, Shape

DTYPES: Final = ("bfloat16", "float16", "float32")
TOKENS_DEFAULT: Final = (512, 4096, 65_536)

COLUMNS: Final[report.Columns] = {
    "codec": lambda row: row.codec,
    "tokens": lambda row: f"{row.tokens:,}",
    "MiB": lambda row: f"{row.bytes / (1 << 20):.2f}",
    "ratio": lambda row: f"{row.ratio:.2f}",
    "to float32": lambda row: f"{row.ratio_float32:.2f}",
    "mean error": lambda row: f"{row.mean_error:.2g}",
    "max error": lambda row: f"{row.max_error:.2g}",
    "cosine": lambda row: f"{row.cosine:.5f}",
    "encode": lambda row: f"{row.encode_ms:,.1f} ms",
    "GB/s": lambda row: f"{row.encode_gb_per_second:.2f}",
    "decode": lambda row: f"{row.decode_ms:,.1f} ms",
    "GB/s ": lambda row: f"{row.decode_gb_per_second:.2f}",
    "peak MiB": lambda row: f"{row.peak_bytes / (1 << 20):.1f}",
}

DESCRIPTION: Final = """\
What each codec of stored rows costs and saves: bytes, error and time on random rows, which go the
way of production (packed 256 at a time into records, attached layer by layer).

ratio        bytes of the cache in --dtype to those of its packed rows
to float32   the same with the cache in float32, as some published figures have it
error        of decoded elements, absolute; cosine: mean over rows of one head
encode       packing and the copy into records
decode       the copy out of records and decoding
GB/s         bytes of the cache in --dtype, by that time
peak         what MLX held at most for it; when decoding, that is the caches and a few packed layers
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    sizes = (
        ("--layers", 2, 1024, "layers of the cache"),
        ("--heads", 2, 1024, "heads of keys and values"),
        ("--head-dim", 64, 8192, "elements of each head's row"),
    )
    for flag, default, most, what in sizes:
        parser.add_argument(
            flag,
            type=whole(1, most),
            default=default,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    parser.add_argument(
        "--seq-len",
        type=whole(1, 1 << 24),
        nargs="+",
        action="extend",
        metavar="TOKENS",
        help="one or more lengths; may be repeated "
        f"(default: {' '.join(map(str, TOKENS_DEFAULT))})",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="of the cache (default: %(default)s)"
    )
    report.add_codec_flag(parser)
    parser.add_argument(
        "--outliers", action="store_true", help="four channels are ten times larger than the others"
    )
    report.add_flags(parser)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Measure and publish; the exit code. Raises ConfigError and BackendError."""
    report.check(flags)
    backend.prepare()
    backend.load()
    # Only now: MLX must not be imported before its BLAS is there.
    from engine import trial  # noqa: PLC0415
    from engine.kv.names import plans_of  # noqa: PLC0415

    backend.apply_memory_limits(backend.memory_limits(backend.describe()))
    shape = trial.Shape(flags.layers, flags.heads, flags.head_dim, flags.dtype, flags.outliers)
    plans = plans_of(flags.codec, shape.layout, report.CODEC_FLAG)
    lengths = sorted(set(flags.seq_len or TOKENS_DEFAULT))
    rows = []
    with report.progress("measuring", len(plans) * len(lengths)) as advance:
        for name, plan in plans.items():
            for tokens in lengths:
                rows.append(trial.measure(name, plan, shape, tokens))
                advance()
    report.publish(flags, _title(shape), COLUMNS, rows, draw)
    return 0


def _title(shape: "Shape") -> str:
    data = "Gaussian rows" + (" with outlier channels" if shape.outliers else "")
    size = f"{shape.layers} layers, {shape.heads} heads of {shape.head_dim}"
    return f"Codecs of a {shape.dtype} cache: {size}, {data}"


def draw(figure: "Figure", rows: "Sequence[Found]") -> None:
    """Error by size, and time by length."""
    by_size, by_length = figure.subplots(1, 2)
    codecs = list(dict.fromkeys(row.codec for row in rows))
    for number, codec in enumerate(codecs):
        of = [row for row in rows if row.codec == codec]
        colour = f"C{number}"
        longest = of[-1]
        report.mark(by_size, longest.ratio, 1 - longest.cosine, codec, colour)
        lengths = [row.tokens for row in of]
        by_length.plot(
            lengths, [row.encode_ms for row in of], "o--", color=colour, label=f"{codec}, encode"
        )
        by_length.plot(
            lengths, [row.decode_ms for row in of], "o-", color=colour, label=f"{codec}, decode"
        )
    by_size.set(xlabel=f"times smaller than {rows[0].dtype}", ylabel="1 - cosine")
    by_size.set_xlim(0, 1.2 * max(row.ratio for row in rows))
    by_length.set(xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
    by_length.legend(fontsize="small")
    for axes in (by_size, by_length):
        axes.grid(alpha=0.3)
