"""Attention that is compared, call by call, with full precision over the same packed rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.kv import attention, routing
from engine.kv.attention import Call, PackedHistory, Strategy

Numbers = npt.NDArray[np.float64]


@dataclass
class Oracle:
    """Notes how far attention is from the reference, relative to numbers above 1: each row's own
    packed bytes, dequantized and rotated back, those just written included. Numpy in float64."""

    calls: int = 0
    worst: float = 0.0
    # What rows of a batch see: the most columns of any call.
    columns: int = 0

    def attend(self, strategy: Strategy, call: Call) -> mx.array:
        attended = attention.attend(strategy, call)
        seen = _seen(call)
        for row in range(call.queries.shape[0]):
            expected = _attend(
                _numbers(call.queries[row]),
                _rows(call.keys, row),
                _rows(call.values, row),
                call.scale,
                seen[row],
                -np.inf if call.sinks is None else _numbers(call.sinks)[:, None, None],
            )
            off = float(np.abs(_numbers(attended[row]) - expected).max())
            self.worst = max(self.worst, off / max(1.0, float(np.abs(expected).max())))
        self.calls += 1
        self.columns = max(self.columns, call.keys.columns)
        return attended


@contextmanager
def compared(strategy: Strategy) -> Iterator[Oracle]:
    """All attention over packed rows goes by an oracle, queries and outputs as models have them."""
    oracle = Oracle()
    with pytest.MonkeyPatch.context() as patch, routing.installed(strategy):
        patch.setattr(routing, "attend", oracle.attend)
        yield oracle


def _numbers(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _rows(history: PackedHistory, row: int) -> Numbers:
    """(KV heads, columns, width) of one row of the batch, as they were before a rotation."""
    codes, scales, biases = (mx.contiguous(array[row, :, : history.columns]) for array in history)
    encoding = history.encoding
    rows = _numbers(
        mx.dequantize(codes, scales, biases, group_size=encoding.group_size, bits=encoding.bits)
    )
    if encoding.rotation is None:
        return rows
    turned: Numbers = rows @ _numbers(encoding.rotation.apply(mx.eye(rows.shape[-1]))).T
    return turned


def _seen(call: Call) -> Any:
    """(B, 1 or heads, L, columns)."""
    mask, columns = call.mask, call.keys.columns
    batch, _, length, _ = call.queries.shape
    heads = 1
    seen: Any = np.True_
    if isinstance(mask, str):
        rows = np.arange(columns - length, columns)
        seen = np.arange(columns) <= rows[:, None]
    elif mask is not None:
        assert mask.dtype == mx.bool_
        seen = np.array(mask)
        heads = mask.shape[-3] if mask.ndim > 2 else 1
    return np.broadcast_to(seen, (batch, heads, length, columns))


def _attend(
    queries: Numbers, keys: Numbers, values: Numbers, scale: float, seen: Any, sinks: Any
) -> Numbers:
    repeats = queries.shape[0] // keys.shape[0]
    keys, values = (np.repeat(rows, repeats, axis=0) for rows in (keys, values))
    scores = np.where(seen, scale * queries @ keys.swapaxes(-1, -2), -np.inf)
    largest = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks - largest)
    attended: Numbers = weights / total @ values
    return attended
