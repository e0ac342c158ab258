"""Bytes of quantized live caches: by the formula for each token, and by half as much again at most
for a batch, whoever joins and leaves."""

import random
from typing import Any

import mlx.core as mx
import pytest

from engine.kv.history import BatchKVCache, Precision, QuantizedKVCache
from engine.kv.rotating import WindowKVCache

HEADS, WIDTH, GROUP_SIZE = 8, 128, 64
FULL_BYTES = 2 * HEADS * WIDTH * 2
WINDOW, KEEP = 512, 4
CAPACITY_MAX = 1.5

Bits = tuple[int, int]
each_bits = pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 4), (3, 5)], ids=str)


def row_bytes(bits: Bits) -> int:
    """Of keys and values: codes, and for each group a scale and a bias of 16 bits."""
    return sum(HEADS * (WIDTH * b // 8 + WIDTH // GROUP_SIZE * 2 * 2) for b in bits)


def rows(sequences: int, count: int) -> mx.array:
    return mx.ones((sequences, HEADS, count, WIDTH), mx.bfloat16)


def single(bits: Bits, bounded: bool, count: int) -> Any:
    precision = Precision.affine(bits, GROUP_SIZE)
    cache: Any = QuantizedKVCache.of(precision)
    if bounded:
        cache = WindowKVCache(precision, WINDOW, KEEP)
    cache.update_and_fetch(rows(1, count), rows(1, count))
    return cache


def held_bytes(cache: Any) -> int:
    arrays, count = cache.part()
    return sum(array[:, :, :count].nbytes for array in arrays)


@each_bits
def test_a_token_takes_what_the_formula_says(bits: Bits) -> None:
    assert held_bytes(single(bits, False, 300)) == 300 * row_bytes(bits)
    assert held_bytes(single(bits, True, 1000)) == WINDOW * row_bytes(bits)


@pytest.mark.parametrize(("bits", "ratio"), [((8, 8), 1.88), ((4, 4), 3.56), ((8, 4), 2.46)])
def test_against_16_bits(bits: Bits, ratio: float) -> None:
    assert 100 * FULL_BYTES / held_bytes(single(bits, False, 100)) == pytest.approx(ratio, abs=0.01)


@each_bits
@pytest.mark.parametrize("bounded", [False, True], ids=["", "bounded"])
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_takes_at_most_half_as_much_again(bits: Bits, bounded: bool, seed: int) -> None:
    chance = random.Random(seed)

    def joining() -> tuple[Any, int]:
        count = chance.randint(256, 1200)
        one = single(bits, bounded, count)
        return one.merge([one]), count

    batch, first = joining()
    ends = [first]
    for _ in range(40):
        match chance.choice(["join", "leave", "grow", "grow"]):
            case "join" if len(ends) < 12:
                other, count = joining()
                batch.extend(other)
                ends.append(count)
            case "leave":
                kept = chance.sample(range(len(ends)), chance.randint(1, len(ends)))
                batch.filter(kept)
                ends = [ends[index] for index in kept]
            case _:
                count = chance.randint(1, 150)
                batch.update_and_fetch(rows(len(ends), count), rows(len(ends), count))
                ends = [end + count for end in ends]
        mx.eval(batch.state[0])
        longest = min(max(ends), WINDOW) if bounded else max(ends)
        assert batch.nbytes <= CAPACITY_MAX * len(ends) * longest * row_bytes(bits)
    for index, end in enumerate(ends):
        held = min(end, WINDOW) if bounded else end
        assert held_bytes(batch.extract(index)) == held * row_bytes(bits)


def test_growth_gives_back_the_place_of_those_who_left() -> None:
    bits = (8, 4)
    batch: Any = BatchKVCache.merge([single(bits, False, 400) for _ in range(10)])
    batch.update_and_fetch(rows(10, 100), rows(10, 100))
    batch.filter(range(7))
    batch.update_and_fetch(rows(7, 1), rows(7, 1))
    assert batch.nbytes <= CAPACITY_MAX * 7 * 501 * row_bytes(bits)
