import json

import mlx.core as mx
import numpy as np
import pytest

from cachestore.record import ArraySpec, RecordError
from engine.config import EngineConfig, Listen
from engine.kv.codec import CODECS, CodecError, CodecPolicy, plan_codec
from engine.kv.encoding import Affine, Lossless, PartShape
from engine.kv.rotation import SEED, Rotation
from engine.kv.turboquant import TURBO_BITS, TurboQuant
from tests.support.caches import layout, random_layers

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("width", "encoding"),
    [
        (32, Affine(8, 32)),
        (64, Affine(8, 64)),
        (80, Lossless()),
        (96, Affine(8, 32)),
        (128, Affine(8, 64)),
        (16, Lossless()),
    ],
)
def test_the_group_size_follows_the_width(width: int, encoding: Affine | Lossless) -> None:
    plan = plan_codec("q8", layout((1, width, 64)))
    assert [part.encoding for part in plan.parts] == [encoding, Affine(8, 64)]


def test_what_does_not_fit_is_stored_lossless_and_said_so() -> None:
    plan = plan_codec("q8", layout((3, 80, 64), (1, 64, 80)), explicit=True)
    assert [type(part.encoding) for part in plan.parts] == [Lossless, Affine, Affine, Lossless]
    assert plan.notes() == [
        "keys of layers 0 to 2 are stored lossless: neither 64 nor 32 divides their width 80",
        "values of layers 3 are stored lossless: neither 64 nor 32 divides their width 80",
    ]


def test_what_fits_needs_no_note() -> None:
    assert plan_codec("q8", layout((2, 64, 32))).notes() == []
    assert plan_codec("none", layout((2, 80, 80))).notes() == []


def test_an_asked_codec_that_fits_no_layer_is_an_error() -> None:
    with pytest.raises(CodecError, match=r"--cache-codec q8: .* use --cache-codec none"):
        plan_codec("q8", layout((2, 80, 16)), explicit=True)
    assert len(plan_codec("q8", layout((2, 80, 16))).notes()) == 2
    plan_codec("none", layout((2, 80, 16)), explicit=True)


def runs(policy: CodecPolicy, path_tokens: int, rows: range) -> list[tuple[str, range]]:
    return [(codec.name, run) for codec, run in policy.runs(path_tokens, rows)]


def test_the_length_of_the_path_chooses() -> None:
    rows = range(200, 210)
    policy = CodecPolicy.of(layout((1, 64, 64)), "q8")
    assert runs(policy, 255, rows) == [("none", rows)]
    assert runs(policy, 256, rows) == [("q8", rows)]
    assert not policy.is_settled(255)
    assert policy.is_settled(256)
    assert runs(CodecPolicy.of(layout((1, 64, 64)), "none"), 5000, rows) == [("none", rows)]
    eager = CodecPolicy.of(layout((1, 64, 64)), "q8", min_quantize_tokens=0)
    assert runs(eager, 210, rows) == [("q8", rows)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (range(0, 100), [("none", range(0, 100))]),
        (range(0, 300), [("none", range(0, 300))]),
        (range(250, 600), [("none", range(250, 300)), ("turbo3", range(300, 600))]),
        (range(300, 301), [("turbo3", range(300, 301))]),
        (range(512, 600), [("turbo3", range(512, 600))]),
    ],
)
def test_the_first_rows_are_kept(rows: range, expected: list[tuple[str, range]]) -> None:
    policy = CodecPolicy.of(layout((1, 64, 64)), "turbo3", keep_first=300)
    assert runs(policy, 600, rows) == expected
    assert runs(policy, 255, range(0, 255)) == [("none", range(0, 255))]


def test_keys_and_values_may_have_bits_of_their_own() -> None:
    plan = plan_codec("k8v4", layout((1, 64, 32)))
    assert [part.encoding for part in plan.parts] == [Affine(8, 64), Affine(4, 32)]


def test_turboquant_fits_what_can_be_rotated() -> None:
    plan = plan_codec("turbo2", layout((3, 80, 72), dtype="bfloat16"), explicit=True)
    assert [part.encoding for part in plan.parts] == [TurboQuant(2, "bfloat16"), Lossless()]
    assert plan.notes() == [
        "values of layers 0 to 2 are stored lossless: their width 72 has no Hadamard transform"
    ]
    with pytest.raises(CodecError, match=r"turbo2: fits no layer .* use --cache-codec none"):
        plan_codec("turbo2", layout((2, 72, 72)), explicit=True)


def test_affine_parts_are_rotated() -> None:
    plan = plan_codec("q4", layout((1, 96, 72)), rotate=True)
    assert [part.encoding for part in plan.parts] == [Affine(4, 32, Rotation(SEED)), Lossless()]
    plain = plan_codec("q4", layout((1, 96, 72)))
    assert plan.row_bytes == plain.row_bytes
    assert plan.schema != plain.schema


@pytest.mark.parametrize(
    ("codec", "width", "said"),
    [
        ("none", 64, "--kv-rotate: --cache-codec none leaves nothing"),
        ("turbo3", 64, "--kv-rotate: --cache-codec turbo3 leaves nothing"),
        ("q8", 72, "--kv-rotate: --cache-codec q8 leaves nothing"),
        ("k8v4", 288, "--kv-rotate: keys of layers 0 to 1 .* width 288 has no Hadamard transform"),
    ],
)
def test_what_cannot_be_rotated_is_an_error(codec: str, width: int, said: str) -> None:
    with pytest.raises(CodecError, match=f"{said}.* leave it out"):
        CodecPolicy.of(layout((2, width, width)), codec, rotate=True)


def test_the_description_tells_policies_apart() -> None:
    geometry = layout((1, 64, 64))
    policies = (
        *(CodecPolicy.of(geometry, name) for name in CODECS),
        CodecPolicy.of(geometry, "q8", min_quantize_tokens=1),
        CodecPolicy.of(geometry, "q8", rotate=True),
        CodecPolicy.of(geometry, "turbo3", keep_first=1),
        CodecPolicy.of(geometry, "turbo3", keep_first=2),
    )
    assert len({json.dumps(policy.describe()) for policy in policies}) == len(policies)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_per_row_are_the_formula(dtype: str, size: int) -> None:
    geometry = layout((30, 64, 64), heads=3, dtype=dtype)
    assert plan_codec("none", geometry).row_bytes == 4 + 30 * 2 * 3 * 64 * size
    assert plan_codec("q8", geometry).row_bytes == 4 + 30 * 2 * 3 * (64 + 2 * size)
    assert plan_codec("q4", geometry).row_bytes == 4 + 30 * 2 * 3 * (32 + 2 * size)
    assert plan_codec("k8v4", geometry).row_bytes == 4 + 30 * 3 * (64 + 32 + 4 * size)
    for bits in TURBO_BITS:
        turbo = plan_codec(f"turbo{bits}", geometry)
        assert turbo.row_bytes == 4 + 30 * 2 * 3 * (64 * bits // 8 + 2)


@pytest.mark.parametrize(
    ("codec", "expected"), [("q8", 1.88), ("q4", 3.56), ("k8v4", 2.46), ("turbo3", 5.12)]
)
def test_bytes_against_sixteen_bits(codec: str, expected: float) -> None:
    geometry = layout((32, 128, 128), heads=8, dtype="bfloat16")
    ratio = plan_codec("none", geometry).row_bytes / plan_codec(codec, geometry).row_bytes
    assert ratio == pytest.approx(expected, abs=0.005)


def test_keys_of_four_bits_are_never_a_default() -> None:
    assert EngineConfig("model", Listen(None, "127.0.0.1:0")).codec == "q8"
    assert CodecPolicy.of(layout((1, 64, 64))).codec.name == "q8"


@pytest.mark.parametrize(("codec", "bits"), [("q8", 8), ("q4", 4)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_decoding_is_what_mlx_dequantizes(width: int, dtype: str, codec: str, bits: int) -> None:
    (rows, _), *_ = random_layers(layout((1, width, width), heads=3, dtype=dtype), rows=70)
    shape = PartShape("keys", 3, width, dtype)
    plan = plan_codec(codec, layout((1, width, width), heads=3, dtype=dtype))
    encoding = plan.parts[0].encoding
    assert isinstance(encoding, Affine)
    codes, scales, biases = encoded = encoding.encode(rows)
    packed = mx.quantize(rows, group_size=encoding.group_size, bits=bits)
    assert all(mx.array_equal(a, b) for a, b in zip(encoded, packed, strict=True))
    assert [
        ArraySpec(name, str(array.dtype).removeprefix("mlx.core."), 3, array.shape[-1])
        for name, array in zip(("codes", "scales", "biases"), encoded, strict=True)
    ] == list(encoding.arrays(shape))
    decoded = encoding.decode(encoded)
    expected = mx.dequantize(codes, scales, biases, group_size=encoding.group_size, bits=bits)
    assert decoded.dtype == rows.dtype
    assert mx.array_equal(decoded, expected)
    # About a step of each group's range; in 16 bits scale, bias and result are rounded too.
    steps = mx.repeat(mx.abs(scales), encoding.group_size, axis=-1)
    assert (mx.abs(decoded - rows) <= 1.1 * steps + 0.1).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rotated_rows_of_float16_stay_finite(bits: int) -> None:
    encoding = Affine(bits, 64, Rotation(SEED))
    # All in one channel, in all of them, and all in one channel once they are rotated.
    rotated = np.array(Rotation(SEED).undo(8 * mx.eye(64)[:1]))[0]
    one, all_of_them = np.eye(64)[3], np.random.default_rng(0).choice([-1, 1], 64)
    rows = mx.array(6e4 * np.stack([one, all_of_them, rotated])).astype(mx.float16)
    back = encoding.decode(encoding.encode(rows))
    assert mx.isfinite(back).all()
    # What is not too large when it is rotated comes back.
    assert mx.abs(back - rows)[0].max() < 6e4 / 2**bits


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_other_bits_are_a_matter_of_the_table(bits: int) -> None:
    encoding = Affine(bits, 32)
    (rows, _), *_ = random_layers(layout((1, 96, 96)), rows=9)
    codes, scales, biases = encoded = encoding.encode(rows)
    widths = [spec.width for spec in encoding.arrays(PartShape("keys", 2, 96, "float32"))]
    assert [array.shape[-1] for array in encoded] == widths
    expected = mx.dequantize(codes, scales, biases, group_size=32, bits=bits)
    assert mx.array_equal(encoding.decode(encoded), expected)


def test_a_record_of_another_layout_has_no_plan() -> None:
    policy = CodecPolicy.of(layout((2, 64, 64)), "q8")
    assert policy.plan_of(plan_codec("none", layout((2, 64, 64))).schema).name == "none"
    for other in (layout((3, 64, 64)), layout((2, 64, 32)), layout((2, 64, 64), dtype="float16")):
        with pytest.raises(RecordError):
            policy.plan_of(plan_codec("q8", other).schema)
