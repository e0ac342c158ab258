"""How rows are encoded for the store.

A codec (`none`, `q8`, `q4`) is a wish; what it comes to depends on the widths of each group of
layers. `CodecPlan` is the outcome for one model: one encoding for each part, and the schema that
every record made with it has. Encodings work row by row, so that what a row becomes never depends
on its neighbours, and a span can begin anywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cachestore import record
from engine import config
from engine.kv.encoding import Affine, Encoding, Lossless, PartShape
from engine.kv.layout import CacheLayout, LayerGroup

FLAG: Final = "--cache-codec"


class CodecError(ValueError):
    """The flag asks for what this model cannot have; the message says what to use instead."""


@dataclass(frozen=True, slots=True)
class AffineBits:
    """The affine quantizer at whatever group size fits a width."""

    bits: int

    def fit(self, width: int) -> Encoding | None:
        sizes = (size for size in (64, 32) if width % size == 0)
        return next((Affine(self.bits, size) for size in sizes), None)


# What each codec wants for a part: nothing, or an encoder that may or may not fit its width.
CODECS: Final[Mapping[str, Mapping[str, AffineBits]]] = {
    "none": {},
    "q8": {"keys": AffineBits(8), "values": AffineBits(8)},
    "q4": {"keys": AffineBits(4), "values": AffineBits(4)},
}


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """The encoding chosen for one part of one group of layers."""

    group: LayerGroup
    shape: PartShape
    encoding: Encoding


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """A codec applied to a layout. `schema.parts` and `parts` are in the same order."""

    name: str
    layout: CacheLayout
    parts: tuple[PlannedPart, ...]
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
            f"{part.shape.name} of layers {_layers(part.group)} are stored lossless: "
            f"neither 64 nor 32 divides their width {part.shape.width}"
            for part in self.parts
            if part.shape.name in wanted and isinstance(part.encoding, Lossless)
        ]


def plan_codec(name: str, layout: CacheLayout, *, explicit: bool = False) -> CodecPlan:
    """Applies codec `name` to a layout.

    CodecError when there is no such codec, or when it was asked for (`explicit`) and fits no layer.
    """
    if name not in CODECS:
        raise CodecError(f"{FLAG} {name}: no such codec; use one of {', '.join(CODECS)}")
    wanted = CODECS[name]
    parts = tuple(
        PlannedPart(group, shape, _choose(wanted.get(shape.name), shape.width))
        for group in layout.groups
        for shape in group.parts
    )
    if explicit and wanted and all(isinstance(part.encoding, Lossless) for part in parts):
        widths = sorted({part.shape.width for part in parts})
        raise CodecError(f"{FLAG} {name}: fits no layer of widths {widths}; use {FLAG} none")
    specs = (
        record.PartSpec(
            part.group.kind,
            part.shape.name,
            part.group.first_layer,
            part.group.layers,
            part.encoding.header,
            part.encoding.arrays(part.shape),
        )
        for part in parts
    )
    return CodecPlan(name, layout, parts, record.Schema(name, tuple(specs)))


@dataclass(frozen=True, slots=True)
class CodecPolicy:
    """Which codec rows are stored with: the chosen one, or none at the end of a short path."""

    codec: CodecPlan
    lossless: CodecPlan
    min_quantize_tokens: int

    @classmethod
    def of(
        cls,
        layout: CacheLayout,
        codec: str = config.CACHE_CODEC_DEFAULT,
        *,
        min_quantize_tokens: int = config.MIN_QUANTIZE_TOKENS_DEFAULT,
        explicit: bool = False,
    ) -> "CodecPolicy":
        """CodecError as `plan_codec`."""
        chosen = plan_codec(codec, layout, explicit=explicit)
        return cls(chosen, plan_codec("none", layout), min_quantize_tokens)

    def codec_for(self, path_tokens: int) -> CodecPlan:
        """By the length of the whole path at commit, never of the record."""
        return self.codec if path_tokens >= self.min_quantize_tokens else self.lossless

    def plan_of(self, schema: record.Schema) -> CodecPlan:
        """The plan that made a record. RecordError when none of this engine's did."""
        for plan in (self.codec, self.lossless):
            if plan.schema == schema:
                return plan
        raise record.RecordError(f"a record of codec {schema.codec!r} is not laid out as ours are")

    def describe(self) -> dict[str, Any]:
        """Everything that identity has to cover."""
        # Without encoding the threshold changes nothing, and must not part what is equal.
        threshold = self.min_quantize_tokens if self.codec != self.lossless else 0
        return {"codec": self.codec.name, "min_quantize_tokens": threshold}


def _choose(wanted: AffineBits | None, width: int) -> Encoding:
    return (wanted.fit(width) if wanted else None) or Lossless()


def _layers(group: LayerGroup) -> str:
    last = group.first_layer + group.layers - 1
    return str(last) if group.layers == 1 else f"{group.first_layer} to {last}"
