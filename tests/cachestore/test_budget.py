import pytest

from cachestore.budget import default_budget_bytes, parse_budget, parse_bytes, physical_memory_bytes
from cachestore.config import GIB, KIB, MIB, SLAB_UNIT_BYTES, StoreConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", MIB),
        ("17B", 17),
        ("512M", 512 * MIB),
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        (" 64k ", 64 * KIB),
        ("1.5G", GIB + GIB // 2),
        ("2TiB", 2048 * GIB),
        ("1GB", 10**9),
        (str(2**53 + 1), 2**53 + 1),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "8 Gibi", "1e9", "8GG", "0x10", "1,5G", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("memory", "budget"),
    [(64 * GIB, 8 * GIB), (8 * GIB, GIB), (4 * GIB, GIB), (2 * GIB, GIB), (GIB, GIB // 2)],
)
def test_the_default_is_an_eighth_but_not_uselessly_little(memory: int, budget: int) -> None:
    assert default_budget_bytes(memory) == budget


@pytest.mark.parametrize(
    ("text", "said"),
    [("15MiB", "at least 16MiB"), ("1GiB1", "8GiB"), ("8.1GiB", f"memory of {8 * GIB} bytes")],
)
def test_a_budget_that_no_store_can_have_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_budget(text, 8 * GIB)
    assert parse_budget("16MiB", 8 * GIB) == 16 * MIB
    assert parse_budget("8GiB", 8 * GIB) == 8 * GIB


def test_this_machine_has_memory() -> None:
    assert physical_memory_bytes() > 64 * MIB


@pytest.mark.parametrize(
    ("budget", "slab"),
    [(16 * MIB, 2 * MIB), (16 * MIB + 8, 2 * MIB), (GIB, 128 * MIB), (64 * GIB, 256 * MIB)],
)
def test_slabs_are_an_eighth_of_the_budget_up_to_a_limit(budget: int, slab: int) -> None:
    config = StoreConfig(budget)
    assert config.slab_bytes == slab
    assert config.next_slab_bytes(0, longest=slab) == slab


def test_the_last_slab_takes_what_is_left_in_whole_pages() -> None:
    config = StoreConfig(budget_bytes=2 * GIB + 100 * MIB + 5)
    assert config.next_slab_bytes(2 * GIB, longest=1) == 100 * MIB
    assert config.next_slab_bytes(2 * GIB + 100 * MIB, longest=1) == 0


def test_a_slab_is_as_large_as_what_has_to_fit_it() -> None:
    config = StoreConfig(budget_bytes=2 * GIB)
    assert config.next_slab_bytes(0, longest=300 * MIB + 1) == 300 * MIB + SLAB_UNIT_BYTES
    assert config.next_slab_bytes(GIB + 800 * MIB, longest=300 * MIB) == 224 * MIB
