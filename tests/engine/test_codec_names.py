"""Codecs by the names that people give them, rotated ones too."""

import pytest

from engine.flags import ConfigError
from engine.kv.codec import CODECS, plan_codec
from engine.kv.encoding import Affine
from engine.kv.names import known, plan_named, plans_of
from tests.support.caches import layout

PLAIN = layout((2, 64, 64))
NOT_HADAMARD = 352  # eleven groups of 32: no size of a Hadamard matrix


def test_every_codec_is_known_and_means_what_the_store_means() -> None:
    assert set(CODECS) <= set(known())
    for name in CODECS:
        assert plan_named(name, PLAIN, "--codec") == plan_codec(name, PLAIN)


def test_an_r_rotates_before_the_quantizer() -> None:
    assert "q4r" in known()
    assert "noner" not in known()
    plain, rotated = (plan_named(name, PLAIN, "--codec") for name in ("q4", "q4r"))
    assert rotated.row_bytes == plain.row_bytes
    assert rotated.schema != plain.schema
    for part, spec in zip(rotated.parts, rotated.schema.parts, strict=True):
        assert isinstance(part.encoding, Affine)
        assert part.encoding.rotation is not None
        assert spec.encoding == part.encoding.header
        assert "hadamard_seed" in spec.encoding


@pytest.mark.parametrize("name", ["q9", "noner", "q9r", "r", "", "q4rr"])
def test_an_unknown_name_is_an_error_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--codec {name}: no such codec; use one of none, q8"):
        plan_named(name, PLAIN, "--codec")


@pytest.mark.parametrize(("name", "width"), [("q8", 80), ("q4r", 80), ("q4r", NOT_HADAMARD)])
def test_what_fits_no_layer_is_an_error_when_it_was_asked_for(name: str, width: int) -> None:
    of = layout((2, width, width))
    with pytest.raises(ConfigError, match=f"^--codec {name}: fits no layer of widths .{width}."):
        plans_of([name], of, "--codec")
    unasked = plans_of(None, of, "--codec")
    assert "none" in unasked
    assert name not in unasked


def test_a_rotation_has_to_fit_all_that_is_quantized() -> None:
    with pytest.raises(ConfigError, match="q4r: fits no layer"):
        plan_named("q4r", layout((1, NOT_HADAMARD, 64)), "--codec")


def test_unasked_are_all_plain_codecs_and_the_rotated_one_of_use() -> None:
    assert set(plans_of(None, PLAIN, "--codec")) == {*CODECS, "q4r"}
