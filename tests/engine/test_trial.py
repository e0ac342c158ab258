"""What the bench of codecs measures: bytes by the formula, errors by MLX's own functions."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine import trial
from engine.kv.codec import plan_codec
from engine.kv.names import known, plan_named
from engine.shelf import RECORD_ROWS, Shelf, always
from engine.trial import Found, Shape, measure
from tests.support.caches import held

SHAPE = Shape(layers=2, heads=2, head_dim=64, dtype="bfloat16")
TOKENS = 600  # two whole records and a part of one


def found(name: str, shape: Shape = SHAPE, tokens: int = TOKENS) -> Found:
    return measure(name, plan_named(name, shape.layout, "--codec"), shape, tokens)


@pytest.mark.parametrize("name", known())
def test_bytes_are_those_of_the_arrays(name: str) -> None:
    row = found(name)
    plan = plan_named(name, SHAPE.layout, "--codec")
    arrays = sum(len(spec.layers) * array.row_bytes for spec, array in plan.schema.arrays)
    assert (row.codec, row.dtype, row.tokens) == (name, "bfloat16", TOKENS)
    assert row.bytes == TOKENS * arrays
    assert row.bytes + 4 * TOKENS < row.record_bytes < 1.05 * row.bytes + 4 * TOKENS
    assert row.ratio == pytest.approx(2 * TOKENS * SHAPE.row_elements / row.bytes)
    assert row.ratio_float32 == pytest.approx(2 * row.ratio)
    assert row.peak_bytes >= 0.99 * TOKENS * SHAPE.row_bytes
    assert min(row.encode_ms, row.decode_ms, row.encode_gb_per_second, row.peak_bytes) > 0


@pytest.mark.parametrize(("name", "ratio", "cosine"), [("q8", 1.88, 0.9999), ("q4", 3.56, 0.995)])
def test_ratios_are_against_the_dtype_of_the_cache(name: str, ratio: float, cosine: float) -> None:
    row = found(name)
    assert row.ratio == pytest.approx(ratio, rel=0.01)
    assert cosine < row.cosine < 1
    assert 0 < row.mean_error < row.max_error
    assert row.mean_error**2 < row.squared_error < row.max_error**2
    # Its scales are four bytes there.
    assert found(name, replace(SHAPE, dtype="float32")).ratio > ratio


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_lossless_has_no_error(dtype: str) -> None:
    row = found("none", replace(SHAPE, dtype=dtype, outliers=True))
    assert (row.ratio, row.mean_error, row.max_error) == (1, 0, 0)
    assert row.cosine == pytest.approx(1, abs=1e-6)


def test_errors_are_those_that_mlx_itself_makes() -> None:
    shape = Shape(layers=1, heads=1, head_dim=64, dtype="float32")
    row = found("q4", shape, RECORD_ROWS)
    errors, cosines = [], []
    for rows in shape.rows(range(RECORD_ROWS))[0]:
        packed = mx.quantize(rows, group_size=64, bits=4)
        decoded = np.array(mx.dequantize(*packed, group_size=64, bits=4), np.float64)
        original = np.array(rows, np.float64)
        errors.append(np.abs(decoded - original))
        norms = np.linalg.norm(decoded, axis=-1) * np.linalg.norm(original, axis=-1)
        cosines.append((decoded * original).sum(-1) / norms)
    assert row.mean_error == pytest.approx(np.mean(errors), rel=1e-5)
    assert row.squared_error == pytest.approx(np.mean(np.square(errors)), rel=1e-5)
    assert row.max_error == pytest.approx(np.max(errors), rel=1e-5)
    assert row.cosine == pytest.approx(np.mean(cosines), rel=1e-5)


def test_a_rotation_spreads_outlier_channels() -> None:
    shape = replace(SHAPE, outliers=True)
    plain, rotated = found("q4", shape), found("q4r", shape)
    assert rotated.bytes == plain.bytes
    assert rotated.squared_error < plain.squared_error / 3
    assert rotated.cosine > plain.cosine


def test_rows_are_the_same_when_they_are_made_again_and_outliers_are_ten_times_larger() -> None:
    span = range(256, 512)
    for of in (SHAPE, replace(SHAPE, outliers=True)):
        first, again = of.rows(span), of.rows(span)
        parts = [part for layer in first for part in layer]
        for part, other in zip(parts, [part for layer in again for part in layer], strict=True):
            assert mx.array_equal(part, other)
        assert not any(mx.array_equal(parts[0], other) for other in parts[1:])
        spread = mx.std(parts[0].astype(mx.float32), axis=(0, 1, 2))
        assert int((spread > 5).sum()) == (trial.OUTLIER_CHANNELS if of.outliers else 0)


def test_chunks_change_nothing_but_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 4 * RECORD_ROWS + 3
    whole = found("q4", tokens=tokens)
    monkeypatch.setattr(trial, "CHUNK_BYTES", 2 * RECORD_ROWS * SHAPE.row_bytes)
    cut = found("q4", tokens=tokens)
    assert (whole.chunks, cut.chunks) == (1, 3)
    assert cut.peak_bytes < 0.7 * whole.peak_bytes
    assert cut.bytes == whole.bytes
    for field in ("mean_error", "squared_error", "max_error", "cosine"):
        assert getattr(cut, field) == pytest.approx(getattr(whole, field), rel=1e-5)


def test_a_shelf_gives_back_what_was_put_into_it() -> None:
    shelf = Shelf(always(plan_codec("none", SHAPE.layout)), TOKENS)
    assert [len(span) for span in shelf.spans] == [256, 256, 88]
    rows = [SHAPE.rows(span) for span in shelf.spans]
    for layers in rows:
        shelf.put(held(layers))
    for caches in (shelf.caches(), shelf.caches()):
        for number, cache in enumerate(caches):
            assert cache.offset == TOKENS
            for place, part in enumerate((cache.keys, cache.values)):
                put = mx.concatenate([layers[number][place] for layers in rows], axis=2)
                assert mx.array_equal(part, put)
