"""Where checkpoints are taken: a pure function of the prompt's length and where others part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoints import POSITIONS_MAX, TOKENS_APART_MIN, planned


@pytest.mark.parametrize(
    ("tokens", "partings", "stride", "whole", "expected"),
    [
        (1, (), 256, False, ()),
        (1, (), 256, True, (1,)),
        (2, (), 256, False, (1,)),
        (2, (), 256, True, (1, 2)),
        # Too short for two of them, but not for one.
        (30, (10, 20), 256, False, (29,)),
        (40, (35,), 256, False, (35,)),
        (200, (50, 150), 256, False, (50, 150, 199)),
        (200, (50, 150), 256, True, (50, 150, 199, 200)),
        # A short message behind a system prompt, and the end of the message behind that.
        (90, (60, 80), 256, False, (60,)),
        (100, (60, 80), 256, False, (60, 99)),
        (100, (60, 98), 256, False, (60, 98)),
        # A system prompt that is not worth one.
        (100, (20, 98), 256, False, (98,)),
        # Others may part anywhere, and where another one does.
        (200, (0, 199, 199, 200, 5000), 256, False, (199,)),
        (257, (), 256, False, (256,)),
        (258, (), 256, False, (256,)),
        (289, (), 256, False, (256, 288)),
        (1000, (256, 700), 256, False, (256, 512, 700, 768, 999)),
        (1000, (250, 700), 256, False, (250, 512, 700, 768, 999)),
    ],
)
def test_positions(
    tokens: int, partings: tuple[int, ...], stride: int, whole: bool, expected: tuple[int, ...]
) -> None:
    assert planned(tokens, partings, stride, whole=whole) == expected


def test_a_very_long_prompt_takes_fewer_that_are_multiples_of_one_another() -> None:
    short = planned(100_000, (50, 99_960), 256)
    long = planned(1_000_000, (50, 999_960), 256)
    assert short == (50, *range(2048, 100_000, 2048), 99_960, 99_999)
    assert {p for p in long if p < 99_960} - {50} <= set(short)


PROMPTS = st.integers(1, 1 << 20)
PARTINGS = st.lists(st.integers(0, 1 << 20), max_size=80)
STRIDES = st.integers(256, 1 << 14)


@given(tokens=PROMPTS, partings=PARTINGS, stride=STRIDES, whole=st.booleans())
def test_what_always_holds(tokens: int, partings: list[int], stride: int, whole: bool) -> None:
    positions = planned(tokens, partings, stride, whole=whole)
    assert len(positions) <= POSITIONS_MAX
    last = tokens if whole else tokens - 1
    assert all(0 < position <= last for position in positions)
    assert positions if last else not positions
    inner = positions[:-1] if whole else positions
    gaps = [b - a for a, b in zip((0, *inner), inner, strict=False)]
    assert min(gaps[1:], default=TOKENS_APART_MIN) >= TOKENS_APART_MIN
    # No gap is wider than the bound demands.
    room = max(1, POSITIONS_MAX - len({*partings, tokens, tokens - 1}))
    assert max(gaps, default=0) <= max(stride, 2 * tokens // room + stride) + TOKENS_APART_MIN


@given(tokens=PROMPTS, partings=PARTINGS.map(lambda drawn: drawn[:20]), stride=STRIDES)
def test_whoever_parts_computes_few_tokens_more_than_with_a_checkpoint_there(
    tokens: int, partings: list[int], stride: int
) -> None:
    positions = planned(tokens, partings, stride)
    for parting in {*partings, tokens - 1}:
        if parting < tokens:
            served = max((position for position in positions if position <= parting), default=0)
            assert parting - served < TOKENS_APART_MIN


@given(tokens=st.integers(1, 5000), partings=PARTINGS.map(lambda drawn: drawn[:20]), stride=STRIDES)
def test_the_end_is_added_and_nothing_else_changes(
    tokens: int, partings: list[int], stride: int
) -> None:
    expected = (*planned(tokens, partings, stride), tokens)
    assert planned(tokens, partings, stride, whole=True) == expected
