"""Codecs by the names that people give them: `q4`, or `q4r` for the same with a rotation."""

import contextlib
from collections.abc import Sequence
from typing import Final

from engine.flags import ConfigError
from engine.kv.codec import CODECS, CodecError, CodecPlan, plan_codec
from engine.kv.encoding import Lossless, PartShape
from engine.kv.kinds import PlainKV
from engine.kv.layout import CacheLayout, LayerGroup

ROTATED: Final = "r"
# The rotated codec that is of most use: measured unasked, as every plain one is.
_USUAL: Final = ("q4" + ROTATED,)
# A width that every encoding takes: tells what a codec comes to where nothing is in its way.
_ANY = CacheLayout(
    (LayerGroup(PlainKV(*(PartShape(n, 1, 128, "float32") for n in ("keys", "values"))), (0,)),)
)


def known() -> list[str]:
    """Every name that `plan_named` takes: each codec, then its rotated form where it has one."""
    return [each for name in CODECS for each in (name, name + ROTATED) if _plan(each, _ANY)]


def plan_named(name: str, layout: CacheLayout, flag: str) -> CodecPlan:
    """Applies the codec of this name to a layout; ConfigError, which names `flag`, for a name that
    is not known and for a codec or a rotation that fits no layer."""
    if name not in known():
        raise ConfigError(f"{flag} {name}: no such codec; use one of {', '.join(known())}")
    plan = _plan(name, layout)
    planned = () if plan is None else (*plan.parts, *plan.states)
    lossless = all(isinstance(part.encoding, Lossless) for part in planned)
    if plan is None or (CODECS.get(name) and lossless):
        widths = sorted({shape.width for group in layout.all for shape in group.parts})
        raise ConfigError(f"{flag} {name}: fits no layer of widths {widths}; use {flag} none")
    return plan


def plans_of(asked: Sequence[str] | None, layout: CacheLayout, flag: str) -> dict[str, CodecPlan]:
    """The plan of each name that was asked for, or, when none was, of each that fits the layout.

    ConfigError as `plan_named`.
    """
    if asked is not None:
        return {name: plan_named(name, layout, flag) for name in asked}
    plans = {}
    for name in known():
        if name in CODECS or name in _USUAL:
            with contextlib.suppress(ConfigError):
                plans[name] = plan_named(name, layout, flag)
    return plans


def _plan(name: str, layout: CacheLayout) -> CodecPlan | None:
    """None when it has nothing that could be rotated, or not in this layout."""
    rotate = name not in CODECS and name.endswith(ROTATED)
    with contextlib.suppress(CodecError):
        return plan_codec(name.removesuffix(ROTATED) if rotate else name, layout, rotate=rotate)
    return None
