"""The check at start lets right strategies through and names what a wrong one does wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import pytest

from engine.kv import attention, routing, start
from engine.kv.attention import STRATEGIES, Call, DequantizeLayer, PackedHistory, Strategy
from engine.kv.attention_check import AttentionCheckFailed, Geometry, check, first_right
from engine.kv.encoding import Affine
from engine.kvconfig import KvConfig
from tests.support.models import tiny_llama

GEOMETRIES = {
    "default": Geometry(),
    "smollm2": Geometry(9, 3, 64, 64),
    "one KV head": Geometry(4, 1, 128, 128),
    "not grouped": Geometry(2, 2, 64, 64),
    "unequal": Geometry(4, 2, 96, 256, keys=Affine(3, 32), values=Affine(6, 128)),
    "no rotation fits": Geometry(4, 2, 288, 64, keys=Affine(8, 32)),
    "bfloat16": Geometry(dtype=mx.bfloat16),
    "float16": Geometry(dtype=mx.float16),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_right_strategies_pass(strategy: Strategy, geometry: Geometry) -> None:
    assert failure(strategy, geometry) is None


def failure(strategy: Strategy, geometry: Geometry) -> str | None:
    try:
        check(strategy, geometry)
    except AttentionCheckFailed as error:
        return str(error)
    return None


def right(call: Call) -> mx.array:
    return DequantizeLayer().attend(call)


@dataclass(frozen=True)
class Planted:
    """A strategy that gives this answer, wrong on purpose."""

    answer: Callable[[Call], mx.array]
    name: str = "planted"

    def attend(self, call: Call) -> mx.array:
        return self.answer(call)


def only_the_first_head(call: Call) -> mx.array:
    """As quantized_matmul with a broadcast packed side on one backend."""
    found = right(call)
    others = mx.roll(found, call.queries.shape[1] // call.keys.heads, 1)
    return mx.concatenate([found[:, :1], others[:, 1:]], axis=1)


def without_mask(call: Call) -> mx.array:
    return right(replace(call, mask=None))


def heedless_of_padding(call: Call) -> mx.array:
    return right(replace(call, mask="causal" if call.queries.shape[2] > 1 else None))


def heedless_of_order(call: Call) -> mx.array:
    return right(replace(call, mask=None)) if isinstance(call.mask, str) else right(call)


def without_sinks(call: Call) -> mx.array:
    return right(replace(call, sinks=None))


def changing_queries(call: Call) -> mx.array:
    """As mlx-lm does."""
    queries = call.queries
    queries *= call.scale
    return right(replace(call, scale=1.0))


def seeing_the_capacity(call: Call) -> mx.array:
    def whole(history: PackedHistory) -> PackedHistory:
        codes, scales, biases = history
        return PackedHistory((codes, scales, biases), history.encoding, history.capacity)

    return right(replace(call, keys=whole(call.keys), values=whole(call.values), mask=None))


def forgetting_small_weights(call: Call) -> mx.array:
    """Of a long history: as sums that are added up in 16 bits."""
    return 0.6 * right(call) if call.keys.columns > 1000 else right(call)


def with_the_bits_of_keys(call: Call) -> mx.array:
    """One number of bits for both, as in mlx-lm."""
    codes, scales, biases = call.values
    misread = replace(call.values.encoding, bits=call.keys.encoding.bits, group_size=32)
    values = PackedHistory((codes, scales, biases), misread, call.values.columns)
    return right(replace(call, values=values))


def mixing_rows(call: Call) -> mx.array:
    """Of a batch that was filtered, as a kernel that takes each buffer for its rows alone."""
    return right(call)[::-1] if len(call.queries) == 2 and call.mask is not None else right(call)


def no_number_where_nothing_is_seen(call: Call) -> mx.array:
    if not isinstance(call.mask, mx.array):
        return right(call)
    return mx.where(call.mask.any(axis=-1, keepdims=True), right(call), mx.nan)


def not_implemented(call: Call) -> mx.array:
    raise RuntimeError("[QuantizedMatmul] No implementation")


def keys_taken_as_not_rotated(call: Call) -> mx.array:
    rotation = call.keys.encoding.rotation
    return (
        right(call)
        if rotation is None
        else right(replace(call, queries=rotation.undo(call.queries)))
    )


def values_taken_as_not_rotated(call: Call) -> mx.array:
    rotation = call.values.encoding.rotation
    return right(call) if rotation is None else rotation.apply(right(call))


PLANTED: dict[Callable[[Call], mx.array], str] = {
    only_the_first_head: r"grouped, one query: differs by .* heads \[1, 2, 3, 4, 5\]",
    without_mask: r"unequal histories, one query: differs by .* rows \[1, 2\]",
    heedless_of_padding: r"unequal histories, one query: differs by .* rows \[1, 2\]",
    heedless_of_order: "grouped, five queries: differs by",
    without_sinks: "sinks, one query: differs by",
    changing_queries: "grouped, one query: its inputs were changed",
    seeing_the_capacity: "grouped, one query: differs by",
    forgetting_small_weights: "a long history, one query: differs by",
    with_the_bits_of_keys: "grouped, one query: shape .* instead of",
    mixing_rows: "a filtered batch, one query: differs by",
    no_number_where_nothing_is_seen: "unequal histories, one query: gives what is no number",
    not_implemented: "grouped, one query: RuntimeError: .* No implementation",
    keys_taken_as_not_rotated: "rotated keys: differs by",
    values_taken_as_not_rotated: "rotated values: differs by",
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("answer", "said"), PLANTED.items(), ids=[answer.__name__ for answer in PLANTED]
)
def test_wrong_strategies_are_named(
    answer: Callable[[Call], mx.array], said: str, dtype: mx.Dtype
) -> None:
    with pytest.raises(AttentionCheckFailed, match=f"by planted, {said}"):
        check(Planted(answer), Geometry(dtype=dtype))


def wrong_in_whole_tiles(call: Call) -> mx.array:
    """As CUDA's product with keys of width 64."""
    found = right(call)
    return found + 1 if call.keys.capacity % 128 == 0 else found


def test_the_first_right_strategy_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    wrong, good = Planted(wrong_in_whole_tiles), DequantizeLayer()
    assert first_right([wrong, good], [Geometry(), Geometry(9, 3)]) is good
    assert "planted, whole tiles, one query: differs by 1" in caplog.text


def test_without_a_right_strategy_the_first_failure_is_raised() -> None:
    strategies = [Planted(wrong_in_whole_tiles), Planted(without_mask, name="other")]
    with pytest.raises(AttentionCheckFailed, match="by planted, whole tiles, one query"):
        first_right(strategies, [Geometry()])


def test_at_start_a_wrong_default_gives_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "DEFAULTS", {"cpu": Planted(wrong_in_whole_tiles)})
    with routing.installed(DequantizeLayer()):
        caches = start.live_caches(tiny_llama(), KvConfig((8, 8)), rotate=False, device="cpu")
        assert len(caches.precisions) == 2
        assert routing._state.strategy is next(iter(STRATEGIES.values()))
    assert "by planted, whole tiles, one query: differs by 1" in caplog.text


def test_at_start_without_a_right_strategy_nothing_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "DEFAULTS", {"cpu": Planted(without_mask)})
    monkeypatch.setattr(attention, "STRATEGIES", {})
    with routing.installed(DequantizeLayer()), pytest.raises(AttentionCheckFailed, match="planted"):
        start.live_caches(tiny_llama(), KvConfig((8, 8)), rotate=False, device="cpu")
