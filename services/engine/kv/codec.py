"""How rows are encoded for the store.

A codec (`q8`, `turbo3`) is a wish; what it comes to depends on the widths of each group of layers.
`CodecPlan` is the outcome for one model: one encoding for each part, and the schema that every
record of rows made with it has. Encodings work row by row, so that what a row becomes never depends
on its neighbours, and a span can begin anywhere. `CodecPolicy` says which rows are encoded at all,
and what a checkpoint looks like: windows are encoded as rows are, recurrent state never is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

from cachestore import record
from cachestore.record import ranges
from engine import config
from engine.kv.encoding import Affine, Encoding, Lossless, PartShape
from engine.kv.kinds import StateKind
from engine.kv.layout import CacheLayout, RowGroup, StateGroup
from engine.kv.rotation import SEED, Rotation
from engine.kv.turboquant import TURBO_BITS, TurboQuant

FLAG: Final = "--cache-codec"
ROTATE_FLAG: Final = "--kv-rotate"


class CodecError(ValueError):
    """The flag asks for what this model cannot have; the message says what to use instead."""


class Wish(Protocol):
    """What a codec wants for a part: an encoding that may or may not fit it."""

    def fit(self, shape: PartShape) -> Encoding | None: ...

    def misfit(self, width: int) -> str:
        """Why it does not fit a part of this width."""


@dataclass(frozen=True, slots=True)
class AffineBits:
    """The affine quantizer at whatever group size fits a width."""

    bits: int

    def fit(self, shape: PartShape) -> Encoding | None:
        sizes = (size for size in (64, 32) if shape.width % size == 0)
        return next((Affine(self.bits, size) for size in sizes), None)

    def misfit(self, width: int) -> str:
        return f"neither 64 nor 32 divides their width {width}"


@dataclass(frozen=True, slots=True)
class TurboBits:
    """TurboQuant, in the dtype of the rows."""

    bits: int

    def fit(self, shape: PartShape) -> Encoding | None:
        return TurboQuant(self.bits, shape.dtype) if TurboQuant.fits(shape.width) else None

    def misfit(self, width: int) -> str:
        return f"their width {width} has no Hadamard transform"


# What each codec wants for a part, if anything. With `none` rows are stored as the live cache holds
# them, quantized or not.
CODECS: Final[Mapping[str, Mapping[str, Wish]]] = {
    "none": {},
    "q8": {"keys": AffineBits(8), "values": AffineBits(8)},
    "q4": {"keys": AffineBits(4), "values": AffineBits(4)},
    "k8v4": {"keys": AffineBits(8), "values": AffineBits(4)},
} | {f"turbo{bits}": dict.fromkeys(("keys", "values"), TurboBits(bits)) for bits in TURBO_BITS}


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """The encoding chosen for one part of one group of layers."""

    group: RowGroup | StateGroup
    shape: PartShape
    encoding: Encoding

    def spec(self, rows: int = 1) -> record.PartSpec:
        """As a record has it, with so many rows as one."""
        arrays = self.encoding.arrays(self.shape)
        return record.PartSpec(
            self.group.kind.name,
            self.shape.name,
            self.group.layers,
            self.encoding.header,
            tuple(replace(array, width=array.width * rows) for array in arrays),
        )


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """A codec applied to a layout: `parts` are of its rows, in the order of `schema.parts`, and
    `states` of its checkpoints."""

    name: str
    layout: CacheLayout
    parts: tuple[PlannedPart, ...]
    states: tuple[PlannedPart, ...]
    schema: record.Schema

    @property
    def row_bytes(self) -> int:
        """Payload bytes that a row takes in the store, over all layers."""
        return self.schema.row_bytes

    @property
    def record_overhead_bytes(self) -> int:
        """Bound on what a record takes beside its rows."""
        return self.schema.overhead_bytes

    def notes(self) -> list[str]:
        """A sentence for each part that the codec does not fit, for the start line."""
        wanted = CODECS[self.name]
        return [
            f"{_named(part)} are stored lossless: "
            f"{wanted[part.shape.name].misfit(part.shape.width)}"
            for part in (*self.parts, *self.states)
            if part.shape.name in wanted and isinstance(part.encoding, Lossless)
        ]


def plan_codec(
    name: str, layout: CacheLayout, *, explicit: bool = False, rotate: bool = False
) -> CodecPlan:
    """Applies codec `name` to a layout, with its affine parts rotated or not.

    CodecError when it was asked for (`explicit`) and fits no layer, and when there is nothing to
    rotate or an affine part cannot be.
    """
    wanted = CODECS[name]
    planned = [
        PlannedPart(group, shape, _choose(wanted.get(shape.name), shape))
        for group in layout.all
        for shape in group.parts
    ]
    if explicit and wanted and all(isinstance(part.encoding, Lossless) for part in planned):
        widths = sorted({part.shape.width for part in planned if part.shape.name in wanted})
        found = f"fits no layer of widths {widths}" if widths else "all layers are recurrent"
        raise CodecError(f"{FLAG} {name}: {found}; use {FLAG} none")
    if rotate:
        planned = _rotated(name, planned)
    parts = tuple(part for part in planned if part.group in layout.groups)
    states = tuple(part for part in planned if part.group in layout.states)
    schema = record.Schema(name, tuple(part.spec() for part in parts))
    return CodecPlan(name, layout, parts, states, schema)


@dataclass(frozen=True, slots=True)
class CheckpointRun:
    """Rows of a part in one encoding: all of them, or those before or behind a cut."""

    part: PlannedPart
    rows: range


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What a checkpoint at one position holds. `schema.parts` and `runs` are in the same order;
    the rows of a run are stored as one."""

    position: int
    runs: tuple[CheckpointRun, ...]
    schema: record.Schema


@dataclass(frozen=True, slots=True)
class CodecPolicy:
    """Which codec rows are stored with: the chosen one, or none. None is for short paths, and for
    the first `keep_first` rows of any."""

    codec: CodecPlan
    lossless: CodecPlan
    min_quantize_tokens: int
    keep_first: int = 0

    @classmethod
    def of(
        cls,
        layout: CacheLayout,
        codec: str = config.CACHE_CODEC_DEFAULT,
        *,
        min_quantize_tokens: int = config.MIN_QUANTIZE_TOKENS_DEFAULT,
        explicit: bool = False,
        rotate: bool = False,
        keep_first: int = 0,
    ) -> "CodecPolicy":
        """CodecError as `plan_codec`. Only TurboQuant keeps rows."""
        assert not keep_first or codec in config.TURBO_CODECS
        chosen = plan_codec(codec, layout, explicit=explicit, rotate=rotate)
        return cls(chosen, plan_codec("none", layout), min_quantize_tokens, keep_first)

    def is_settled(self, path_tokens: int) -> bool:
        """Whether every row of all longer paths has the codec that it has in one of this length:
        the whole path's at commit, never the record's."""
        return path_tokens >= self.min_quantize_tokens

    def runs(self, path_tokens: int, rows: range) -> list[tuple[CodecPlan, range]]:
        """Rows of a path of this length, cut where their codec changes."""
        kept_rows = self.keep_first if self.is_settled(path_tokens) else rows.stop
        cut = min(max(rows.start, kept_rows), rows.stop)
        runs = ((self.lossless, range(rows.start, cut)), (self.codec, range(cut, rows.stop)))
        return [(codec, part) for codec, part in runs if part]

    def checkpoint(self, position: int) -> CheckpointPlan:
        """Encoded as rows of a path that ends there are: it follows from the position alone."""
        settled = self.is_settled(position)
        chosen = self.codec if settled else self.lossless
        runs: list[CheckpointRun] = []
        for kept, encoded in zip(self.lossless.states, chosen.states, strict=True):
            kind = cast(StateKind, encoded.group.kind)
            rows = range(kind.rows_at(position))
            cut = kind.first_rows(position, self.keep_first) if settled else 0
            pieces = (CheckpointRun(kept, rows[:cut]), CheckpointRun(encoded, rows[cut:]))
            runs += [piece for piece in pieces if piece.rows]
        parts = tuple(run.part.spec(len(run.rows)) for run in runs)
        return CheckpointPlan(position, tuple(runs), record.Schema(chosen.name, parts))

    def plan_of(self, schema: record.Schema) -> CodecPlan:
        """The plan that made a record. RecordError when none of this engine's did."""
        for plan in (self.codec, self.lossless):
            if plan.schema == schema:
                return plan
        raise record.RecordError(f"a record of codec {schema.codec!r} is not laid out as ours are")

    def describe(self) -> dict[str, Any]:
        """Everything that identity has to cover, as plain values in a fixed order."""
        # Without encoding the threshold changes nothing, and must not part what is equal.
        threshold = self.min_quantize_tokens if self.codec != self.lossless else 0
        return {
            "codec": self.codec.name,
            "encodings": [
                dict(part.encoding.header) for part in (*self.codec.parts, *self.codec.states)
            ],
            "min_quantize_tokens": threshold,
            "keep_first": self.keep_first,
        }


def _choose(wanted: Wish | None, shape: PartShape) -> Encoding:
    """As the live cache holds them, where nothing else is wanted or fits."""
    return (wanted.fit(shape) if wanted else None) or shape.live


def _rotated(name: str, parts: list[PlannedPart]) -> list[PlannedPart]:
    """The parts, those that are affine behind a rotation."""
    rotated = []
    for part in parts:
        match part.encoding:
            case Affine() as plain:
                encoding = replace(plain, rotation=Rotation(SEED))
                if not encoding.fits(part.shape.width):
                    raise CodecError(
                        f"{ROTATE_FLAG}: {_named(part)} cannot be rotated, their width "
                        f"{part.shape.width} has no Hadamard transform; leave it out"
                    )
                rotated.append(replace(part, encoding=encoding))
            case _:
                rotated.append(part)
    if rotated == parts:
        raise CodecError(
            f"{ROTATE_FLAG}: {FLAG} {name} leaves nothing to rotate; leave it out, or use "
            f"{FLAG} q8, q4 or k8v4"
        )
    return rotated


def _named(part: PlannedPart) -> str:
    """As in "keys of layers 0 to 29"."""
    return f"{part.shape.name} of layers {ranges(part.group.layers)}"
