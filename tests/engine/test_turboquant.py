"""TurboQuant: what rows become, and what it costs them."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.kv.codebook import levels
from engine.kv.encoding import Affine, PartShape
from engine.kv.export import host_view
from engine.kv.rotation import Rotation
from engine.kv.turboquant import TURBO_BITS, TurboQuant

DTYPES = ("float32", "bfloat16", "float16")
WIDTHS = (8, 16, 24, 32, 40, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
# The least distortion of 1, 2, 3 and 4 bits, of 1 (J. Max, "Quantizing for minimum distortion").
GAUSSIAN_ERROR = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def with_outliers(rows: mx.array) -> mx.array:
    """Four channels ten times larger."""
    scale = np.ones(rows.shape[-1], np.float32)
    scale[[1, 5, 18, 40]] = 10
    return rows * mx.array(scale)


def decoded(encoding: Any, rows: mx.array) -> mx.array:
    made: mx.array = encoding.decode(encoding.encode(rows))
    return made


def cosine(a: mx.array, b: mx.array) -> float:
    """The mean over rows."""
    return float(((a * b).sum(-1) / mx.linalg.norm(a, axis=-1) / mx.linalg.norm(b, axis=-1)).mean())


# --- the codebook ------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "bits"), [(8, 2), (64, 1), (64, 3), (80, 4), (128, 3)])
def test_the_codebook_is_what_lloyd_finds_on_a_sample_of_the_density(width: int, bits: int) -> None:
    random = np.random.default_rng(1)
    # x**2 of a random unit vector is beta-distributed.
    sample = np.sqrt(random.beta(0.5, (width - 1) / 2, 200_000) * width)
    found = np.array(levels(width, bits))
    for _ in range(100):
        cells = np.searchsorted((found[1:] + found[:-1]) / 2, sample)
        found = np.array([sample[cells == cell].mean() for cell in range(len(found))])
    np.testing.assert_allclose(levels(width, bits), found, rtol=0.01)


@pytest.mark.parametrize(
    ("bits", "known"),
    [
        (1, [math.sqrt(2 / math.pi)]),
        (2, [0.4528, 1.510]),
        (3, [0.2451, 0.7560, 1.344, 2.152]),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
    ],
)
def test_wide_rows_have_the_codebook_of_a_gaussian(bits: int, known: list[float]) -> None:
    np.testing.assert_allclose(levels(8192, bits), known, rtol=1e-3)


# --- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", TURBO_BITS)
@pytest.mark.parametrize("width", [64, 128])
def test_the_error_is_that_of_the_best_quantizer(width: int, bits: int) -> None:
    def relative_error(rows: mx.array) -> float:
        error = mx.square(decoded(TurboQuant(bits, "float32"), rows) - rows).sum(-1)
        return float((error / mx.square(rows).sum(-1)).mean())

    rows = gaussian(1, 2, 4000, width)
    assert relative_error(rows) == pytest.approx(GAUSSIAN_ERROR[bits], rel=0.05)
    # A few channels spread over all of them: coordinates are less random then, and closer.
    assert relative_error(with_outliers(rows)) < 1.05 * GAUSSIAN_ERROR[bits]


@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_three_bits_keep_directions(width: int) -> None:
    for rows in (gaussian(1, 2, 2000, width), with_outliers(gaussian(1, 2, 2000, width))):
        assert cosine(decoded(TurboQuant(3, "float32"), rows), rows) >= 0.98


@pytest.mark.parametrize("width", [64, 128])
def test_rotation_takes_two_thirds_of_the_error_that_outliers_make(width: int) -> None:
    rows = with_outliers(gaussian(1, 2, 2000, width))
    plain, rotated = (
        float(mx.square(decoded(encoding, rows) - rows).mean())
        for encoding in (Affine(4, 64), Affine(4, 64, Rotation(1)))
    )
    assert rotated <= plain / 3


@pytest.mark.parametrize(("width", "least"), [(64, 4.9), (128, 5.1)])
def test_three_bits_against_sixteen(width: int, least: float) -> None:
    shape = PartShape("keys", 1, width, "bfloat16")
    specs = TurboQuant(3, "bfloat16").arrays(shape)
    assert 2 * width / sum(spec.row_bytes for spec in specs) >= least


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    bits=st.sampled_from(TURBO_BITS),
    dtype=st.sampled_from(DTYPES),
    heads=st.integers(1, 3),
    rows=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
@example(width=96, bits=3, dtype="bfloat16", heads=1, rows=1, seed=0)
@example(width=8, bits=1, dtype="float16", heads=1, rows=1, seed=0)
def test_any_shape_is_held_in_the_bytes_that_are_declared(
    width: int, bits: int, dtype: str, heads: int, rows: int, seed: int
) -> None:
    encoding = TurboQuant(bits, dtype, seed)
    of = gaussian(2, heads, rows, width, seed=seed).astype(getattr(mx, dtype))
    encoded = encoding.encode(of)
    mx.eval(encoded)
    specs = encoding.arrays(PartShape("keys", heads, width, dtype))
    assert sum(spec.row_bytes for spec in specs) == heads * (width * bits // 8 + 2)
    for array, spec in zip(encoded, specs, strict=True):
        assert array.shape == (2, heads, rows, spec.width)
        assert host_view(array, spec, array.shape).nbytes == 2 * rows * spec.row_bytes
    back = encoding.decode(encoded)
    assert (back.dtype, back.shape) == (of.dtype, of.shape)
    exact = of.astype(mx.float32)
    norms = mx.linalg.norm(exact, axis=-1)
    # A vector's error may be well above the mean, most of all where it has few coordinates.
    error = mx.linalg.norm(back.astype(mx.float32) - exact, axis=-1)
    assert (error <= {1: 1.1, 2: 0.75, 3: 0.5, 4: 0.3}[bits] * norms).all()


@settings(max_examples=30, deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    bits=st.sampled_from(TURBO_BITS),
    first=st.integers(0, 30),
    rows=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_a_row_does_not_depend_on_its_neighbours(
    width: int, bits: int, first: int, rows: int, seed: int
) -> None:
    encoding = TurboQuant(bits, "float32")
    of = gaussian(2, 2, 70, width, seed=seed)
    together = [array[:1, :, first : first + rows] for array in encoding.encode(of)]
    apart = encoding.encode(of[:1, :, first : first + rows])
    assert all(mx.array_equal(a, b) for a, b in zip(together, apart, strict=True))
    # And a span of stored rows is decoded as in the whole.
    whole = decoded(encoding, of)[:1, :, first : first + rows]
    assert mx.allclose(encoding.decode(together), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_size_of_a_row_becomes_zero_or_infinite(dtype: str) -> None:
    sizes = [6e-8, 1e-4, 1.0, 1000.0, 6e4]
    if dtype != "float16":
        sizes += [1e-37, 1e-30, 1e5, 1e20, 1e37]
    unit = gaussian(1, 1, 1, 128)
    rows = (unit / mx.abs(unit).max() * mx.array(sizes)[:, None, None, None]).astype(
        getattr(mx, dtype)
    )
    back = (
        decoded(TurboQuant(4, dtype), rows).astype(mx.float32)
        / mx.array(sizes)[:, None, None, None]
    )
    exact = rows.astype(mx.float32) / mx.array(sizes)[:, None, None, None]
    assert (mx.linalg.norm(back - exact, axis=-1) < 0.15 * mx.linalg.norm(exact, axis=-1)).all()


def test_the_largest_float16_stays_finite() -> None:
    rows = mx.full((1, 1, 1, 64), 65504.0).astype(mx.float16)
    back = decoded(TurboQuant(3, "float16"), rows)
    assert mx.isfinite(back).all()
    assert (back > 30_000).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nothing_and_one_that_is_broken_stay_so(dtype: str) -> None:
    rows = np.ones((1, 1, 5, 64), np.float32)
    rows[0, 0, 1] = 0
    rows[0, 0, 2, 7] = np.nan
    rows[0, 0, 3, 7] = -np.inf
    back = decoded(TurboQuant(2, dtype), mx.array(rows).astype(getattr(mx, dtype)))[0, 0]
    assert (back[1] == 0).all()
    assert mx.isnan(back[2]).all()
    assert mx.isnan(back[3]).all()
    # Their neighbours do not notice.
    assert mx.isfinite(back[0]).all()
    assert mx.array_equal(back[0], back[4])


def test_other_bits_and_widths_do_not_fit() -> None:
    for bits in (0, 5, 8):
        with pytest.raises(ValueError, match=r"no \d bits; use one of \(1, 2, 3, 4\)"):
            TurboQuant(bits, "float32")
    assert [width for width in range(1, 300) if TurboQuant.fits(width)] == [
        *(8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    ]


@pytest.mark.parametrize(
    ("bits", "codes", "first_values"),
    [
        (1, "57ac", [1.0447, -1.0447, 1.0447, 1.0447]),
        (2, "3e26a19c", [0.58, 0.7334, 0.58, 1.8934]),
        (3, "bd41350a898e", [-0.047, 0.3239, -0.2501, 1.303]),
        (4, "eb1c393a3489b186", [-0.0135, -0.0282, -0.9235, 1.6849]),
    ],
)
def test_stored_bytes_mean_the_same_in_every_version(
    bits: int, codes: str, first_values: list[float]
) -> None:
    row = mx.array([math.sin(3 * n) * (1 + n % 5) for n in range(16)]).reshape(1, 1, 1, 16)
    encoding = TurboQuant(bits, "float32", seed=1)
    encoded, norms = encoding.encode(row)
    assert np.array(encoded).tobytes().hex() == codes
    assert norms.item() == 10.3125
    back = np.array(encoding.decode((encoded, norms)))
    np.testing.assert_allclose(back[0, 0, 0, :4], first_values, atol=1e-3)
