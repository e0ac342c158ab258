"""Where checkpoints are taken: a pure function of the prompt's length and its messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoints import POSITIONS_MAX, planned


@pytest.mark.parametrize(
    ("tokens", "ends", "stride", "whole", "expected"),
    [
        (1, (), 256, False, ()),
        (1, (), 256, True, (1,)),
        (2, (), 256, False, (1,)),
        (2, (), 256, True, (1, 2)),
        (100, (30, 90), 256, False, (30, 90, 99)),
        (100, (30, 90), 256, True, (30, 90, 99, 100)),
        # The end of a message may be anywhere, and the same as another.
        (100, (0, 99, 99, 100, 5000), 256, False, (99,)),
        (257, (), 256, False, (256,)),
        (258, (), 256, False, (256, 257)),
        (1000, (256, 700), 256, False, (256, 512, 700, 768, 999)),
    ],
)
def test_positions(
    tokens: int, ends: tuple[int, ...], stride: int, whole: bool, expected: tuple[int, ...]
) -> None:
    assert planned(tokens, ends, stride, whole=whole) == expected


def test_a_very_long_prompt_takes_fewer_that_are_multiples_of_one_another() -> None:
    short = planned(100_000, (50, 99_990), 256)
    long = planned(1_000_000, (50, 999_990), 256)
    assert short == (50, *range(2048, 100_000, 2048), 99_990, 99_999)
    assert {p for p in long if p < 99_990} - {50} <= set(short)


PROMPTS = st.integers(1, 1 << 20)
ENDS = st.lists(st.integers(0, 1 << 20), max_size=80)
STRIDES = st.integers(256, 1 << 14)


@given(tokens=PROMPTS, ends=ENDS, stride=STRIDES, whole=st.booleans())
def test_what_always_holds(tokens: int, ends: list[int], stride: int, whole: bool) -> None:
    positions = planned(tokens, ends, stride, whole=whole)
    assert len(positions) <= POSITIONS_MAX
    assert list(positions) == sorted(set(positions))
    last = tokens if whole else tokens - 1
    assert all(0 < position <= last for position in positions)
    assert not last or positions[-1] == last
    if len(ends) < POSITIONS_MAX - 2:
        assert {end for end in ends if 0 < end <= last} <= set(positions)
    # No gap is wider than the bound demands.
    steps = [b - a for a, b in zip((0, *positions), positions, strict=False)]
    room = max(1, POSITIONS_MAX - len({*ends, tokens, tokens - 1}))
    assert max(steps, default=0) <= max(stride, 2 * tokens // room + stride)


@given(tokens=st.integers(1, 5000), ends=ENDS.map(lambda ends: ends[:20]), stride=STRIDES)
def test_the_end_is_added_and_nothing_else_changes(
    tokens: int, ends: list[int], stride: int
) -> None:
    ends = [end for end in ends if end < tokens]
    assert planned(tokens, ends, stride, whole=True) == (*planned(tokens, ends, stride), tokens)
