"""Leads the attention of mlx-lm's models to ours, where a layer's history is packed.

Models call `base.scaled_dot_product_attention`, most by a name that they imported. It refuses
attention sinks for quantized caches before its inner function is reached, so both are replaced,
the outer one under each name that a loaded model has for it. What is no PackedHistory goes to
mlx-lm's own functions, as it came, or on a CPU in the shapes that are fastest there (on_cpu.py).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import base

from engine.kv import on_cpu
from engine.kv.attention import Call, PackedHistory, Strategy, attend

_Function = Callable[..., mx.array]

_OUTER: Final[_Function] = base.scaled_dot_product_attention
_INNER: Final[_Function] = base.quantized_scaled_dot_product_attention


@dataclass(slots=True)
class Routed:
    """Attention over packed rows that was asked of us. `grouping`: query heads for each KV head."""

    calls: int = 0
    grouping: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _State:
    strategy: Strategy | None
    counts: list[Routed]


# Functions of another library are replaced: there is one of this in a process.
_state: Final = _State(strategy=None, counts=[])


def install(strategy: Strategy) -> None:
    """From now on packed histories are attended to by this strategy. Idempotent."""
    _state.strategy = strategy
    _rebind((_OUTER, _outer), (_INNER, _inner))


def uninstall() -> None:
    """As if nothing had been installed; models that were loaded since included."""
    _state.strategy = None
    _rebind((_outer, _OUTER), (_inner, _INNER))


@contextmanager
def installed(strategy: Strategy | None) -> Iterator[None]:
    """For the length of a block, after which it is as before. None: mlx-lm's own attention."""
    before = _state.strategy
    _put(strategy)
    try:
        yield
    finally:
        _put(before)


def _put(strategy: Strategy | None) -> None:
    if strategy is None:
        uninstall()
    else:
        install(strategy)


@contextmanager
def counted() -> Iterator[Routed]:
    """Counts what comes here during the block: after one forward, one call for each layer that
    has a packed history, or else some layer went another way."""
    count = Routed()
    _state.counts.append(count)
    try:
        yield count
    finally:
        _state.counts.remove(count)


def _rebind(*replacements: tuple[_Function, _Function]) -> None:
    """Each (old, new), under all names that models have for the old one."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("mlx_lm.models."):
            continue
        for name, found in list(vars(module).items()):
            for old, new in replacements:
                if found is old:
                    setattr(module, name, new)


def _outer(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if isinstance(keys, PackedHistory):
        return _attend(Call(queries, keys, values, scale, mask, sinks))
    if sinks is None:
        return on_cpu.attend(_OUTER, queries, keys, values, cache, scale, mask)
    return _OUTER(queries, keys, values, cache, scale, mask, sinks)


def _inner(
    queries: mx.array,
    q_keys: Any,
    q_values: Any,
    scale: float,
    mask: Any,
    group_size: int = 64,
    bits: int = 8,
) -> mx.array:
    # A model whose name for the outer function was not found comes here, if it has no sinks.
    if isinstance(q_keys, PackedHistory):
        return _attend(Call(queries, q_keys, q_values, scale, mask))
    return _INNER(queries, q_keys, q_values, scale, mask, group_size, bits)


def _attend(call: Call) -> mx.array:
    assert _state.strategy is not None
    for count in _state.counts:
        count.calls += 1
        count.grouping.add(call.queries.shape[1] // call.keys.heads)
    return attend(_state.strategy, call)
