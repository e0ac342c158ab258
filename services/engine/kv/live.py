"""Which caches the layers of a model have while a request runs.

Plain layers have our caches, in full precision, quantized (`--kv-bits`) or bounded
(`--max-kv-size`); so have windows of the model's own and recurrent layers. A layer whose attention
does not go through mlx-lm's cannot read packed rows; which ones those are is tried out with a
small forward pass, not looked up by name. Caches in a CacheList count as layers of their own.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from engine.flags import ConfigError
from engine.kv.attention_check import Geometry
from engine.kv.encoding import Affine
from engine.kv.history import (
    FULL,
    History,
    JoiningKVCache,
    LateKVCache,
    Precision,
    QuantizedKVCache,
)
from engine.kv.kinds import leaves
from engine.kv.recurrent import RecurrentCache
from engine.kv.rotating import WindowKVCache
from engine.kv.rotation import SEED, Rotation
from engine.kv.routing import counted
from engine.kvconfig import GROUP_SIZE_DEFAULT, WINDOW_KEEP, KvConfig

log = logging.getLogger(__name__)

_NEITHER: Final = "only plain ones and windows can be quantized or bounded"
_THEIRS: Final[Mapping[type, str]] = {
    ArraysCache: "recurrent state, not rows of tokens",
    ChunkedKVCache: f"rows that leave by chunks; {_NEITHER}",
    ConcatenateKVCache: f"rows that run in no batch; {_NEITHER}",
}


@dataclass(frozen=True, slots=True)
class LiveCaches:
    """Makes the empty caches of one request.

    `precisions` are of those layers that are quantized; `reasons` of those that could not be,
    though that was asked for. Both by the numbers of leaves.
    """

    model: Any
    precisions: Mapping[int, Precision] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    config: KvConfig = field(default_factory=KvConfig)

    def fresh(self) -> list[Any]:
        numbers = itertools.count()
        return [self._made(cache, numbers) for cache in make_prompt_cache(self.model)]

    def _made(self, cache: Any, numbers: Iterator[int]) -> Any:
        """In place of one of the model's caches, whose leaves have the next numbers."""
        if not isinstance(cache, CacheList):
            return self._cache(cache, next(numbers), self.config.max_size)
        # What is in a list is not bounded: some indexers go by the places of rows.
        made = (self._cache(leaf, next(numbers), None) for leaf in cache.caches)
        return CacheList(*made)  # type: ignore[no-untyped-call]

    def _cache(self, cache: Any, number: int, max_size: int | None) -> Any:
        precision = self.precisions.get(number, FULL)
        if type(cache) is KVCache:
            return self._plain(precision, max_size)
        if type(cache) is RotatingKVCache:
            return WindowKVCache(precision, cache.max_size, cache.keep)
        if type(cache) is ArraysCache:
            return RecurrentCache.of(cache)
        return cache

    def _plain(self, precision: Precision, max_size: int | None) -> Any:
        if max_size is not None:
            return WindowKVCache(precision, max_size, WINDOW_KEEP)
        if precision == FULL:
            return JoiningKVCache.of(FULL)
        if self.config.quantized_start:
            return LateKVCache(precision, self.config.quantized_start)
        return QuantizedKVCache.of(precision)

    def notes(self) -> list[str]:
        """For each kind of layer a line that says what was chosen, and why."""
        kinds: Counter[str] = Counter()
        theirs, ours = leaves(make_prompt_cache(self.model)), leaves(self.fresh())
        for n, (cache, made) in enumerate(zip(theirs, ours, strict=True)):
            kinds[f"{type(cache).__name__}: {self._note(n, made)}"] += 1
        return [f"{count} x {kind}" for kind, count in kinds.items()]

    def _note(self, layer: int, made: Any) -> str:
        if not isinstance(made, JoiningKVCache | History):
            return f"as mlx-lm has it{self._because(layer, _why_theirs(made))}"
        bounded = ""
        if isinstance(made, WindowKVCache):
            bounded = f", the first {made.keep} and latest rows of {made.max_size}"
        precision = self.precisions.get(layer, FULL)
        if precision == FULL:
            return f"full precision{bounded}{self._because(layer)}"
        start = self.config.quantized_start
        since = f", from {start} tokens on (full precision before)" if start else ""
        return f"{describe(precision)}{bounded}{since}"

    def _because(self, layer: int, otherwise: str = "") -> str:
        reason = self.reasons.get(layer, otherwise)
        return f" ({reason})" if reason else ""


def _why_theirs(cache: Any) -> str:
    """Of a layer that has no cache of ours."""
    return next((why for kind, why in _THEIRS.items() if isinstance(cache, kind)), "unknown here")


def describe(precision: Precision) -> str:
    """For people."""
    keys, values = precision.keys, precision.values
    assert isinstance(keys, Affine)
    assert isinstance(values, Affine)
    rotated = ", rotated" if keys.rotation is not None else ""
    return f"keys {keys.bits} bits, values {values.bits} bits, groups of {keys.group_size}{rotated}"


def choose(model: Any, config: KvConfig, rotate: bool) -> LiveCaches:
    """What the flags come to for this model, on the MLX thread, once attention is routed to ours.

    Raises ConfigError when they can change no layer, or a head size has no Hadamard transform.
    """
    if not config.changes:
        return LiveCaches(model)
    caches = make_prompt_cache(model)
    kinds = Counter(type(cache).__name__ for cache in caches)
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no caches"
    if config.max_size is not None and KVCache not in map(type, caches):
        raise ConfigError(
            f"--max-kv-size: this model has no layer with a plain KVCache ({found}); leave it out"
        )
    if config.bits is None:
        return LiveCaches(model, config=config)
    group_size = config.group_size or GROUP_SIZE_DEFAULT
    precision = Precision.affine(config.bits, group_size, Rotation(SEED) if rotate else None)
    widths = _widths(model, config)
    fitting = _fitting(widths, precision)
    reasons = {
        n: f"groups of {group_size} do not divide its head sizes {widths[n]}"
        for n in widths.keys() - fitting
    }
    wanted = LiveCaches(model, dict.fromkeys(fitting, precision), config=config)
    packed, unpacked = _readable(_at_once(wanted))
    reasons.update(unpacked)
    if config.quantized_start:
        windows = {n for n, cache in enumerate(leaves(caches)) if type(cache) is RotatingKVCache}
        reasons.update(dict.fromkeys(windows, "--quantized-kv-start is for unbounded layers"))
        packed = [n for n in packed if n not in windows]
    if not packed:
        why = f": {next(iter(reasons.values()))}" if reasons else ""
        raise ConfigError(
            f"--kv-bits: no layer of this model can be quantized ({found}{why}); leave it out, "
            "or use --cache-codec q8, which quantizes the store alone"
        )
    return LiveCaches(model, dict.fromkeys(packed, precision), reasons, config)


def geometries(live: LiveCaches) -> set[Geometry]:
    """What the quantized layers are made of, for the check of attention; on the MLX thread."""
    caches = _at_once(live).fresh()
    with counted() as routed:
        _forward(live.model, caches)
    held = leaves(caches)
    return {
        _geometry(live.precisions[n], held[n].part()[0], grouping)
        for n in live.precisions
        for grouping in routed.grouping
    }


def _at_once(live: LiveCaches) -> LiveCaches:
    """As they are once they are quantized."""
    return replace(live, config=replace(live.config, quantized_start=0))


def _geometry(precision: Precision, arrays: Sequence[mx.array], grouping: int) -> Geometry:
    (_, key_scales, _), (_, value_scales, _) = precision.split(arrays)
    keys, values = precision.keys, precision.values
    assert isinstance(keys, Affine)
    assert isinstance(values, Affine)
    kv_heads = key_scales.shape[1]
    return Geometry(
        heads=grouping * kv_heads,
        kv_heads=kv_heads,
        key_width=key_scales.shape[-1] * keys.group_size,
        value_width=value_scales.shape[-1] * values.group_size,
        dtype=key_scales.dtype,
        keys=keys,
        values=values,
    )


def _widths(model: Any, config: KvConfig) -> dict[int, tuple[int, int]]:
    """Head sizes of keys and values of each layer whose cache can be ours."""
    caches = LiveCaches(model, config=config).fresh()
    _forward(model, caches)
    widths = {}
    for n, cache in enumerate(leaves(caches)):
        if isinstance(cache, JoiningKVCache | LateKVCache | WindowKVCache) and not cache.empty():
            arrays, _ = cache.part()
            widths[n] = (arrays[0].shape[-1], arrays[1].shape[-1])
    return widths


def _fitting(widths: Mapping[int, tuple[int, int]], precision: Precision) -> list[int]:
    """Layers of a width that can be held. Raises ConfigError when none can, or is not to be."""
    keys, values = precision.keys, precision.values
    assert isinstance(keys, Affine)
    assert isinstance(values, Affine)
    # An indexer has keys without values.
    sizes = sorted({width for pair in widths.values() for width in pair if width})
    without = [w for w in sizes if keys.rotation is not None and not keys.rotation.fits(w)]
    if without:
        raise ConfigError(
            f"--kv-rotate: there is no Hadamard transform of head size {without[0]}; leave it out"
        )
    fitting = [n for n, (k, v) in widths.items() if keys.fits(k) and values.fits(v)]
    if widths and not fitting:
        raise ConfigError(
            f"--kv-group-size {keys.group_size}: divides no head size of this model ({sizes}); "
            + _smaller_group(sizes, keys.group_size)
        )
    return fitting


def _smaller_group(sizes: Sequence[int], group_size: int) -> str:
    fits = [g for g in (64, 32) if g < group_size and any(size % g == 0 for size in sizes)]
    return f"use {fits[0]}" if fits else "leave --kv-bits out"


def _readable(live: LiveCaches) -> tuple[list[int], dict[int, str]]:
    """Which of the layers that are to be packed really are read as such; why others are not."""
    layers = sorted(live.precisions)
    if _fails(live, len(layers)) is None:
        return layers, {}
    readable, reasons = [], {}
    for n in layers:
        alone = LiveCaches(live.model, {n: live.precisions[n]}, config=live.config)
        reason = _fails(alone, 1)
        if reason is None:
            readable.append(n)
        else:
            reasons[n] = reason
    return readable, reasons


def _fails(live: LiveCaches, layers: int) -> str | None:
    """Why a forward pass does not read so many packed layers, if it does not."""
    with counted() as routed:
        try:
            _forward(live.model, live.fresh())
        except Exception as error:
            log.debug("a layer cannot be packed", exc_info=error)
            return f"it computes on its rows itself: {type(error).__name__}"
    return None if routed.calls >= layers else "its attention is its own"


def _forward(model: Any, caches: list[Any]) -> None:
    mx.eval(model(mx.array([[0, 0]]), cache=caches))
