import _posixshmem  # type: ignore[import-not-found]  # no stub
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cachestore import shm, variables
from tests.support.slabs import held_slabs

SIZE = 1 << 20

pytestmark = pytest.mark.usefixtures("no_slab_is_left")


@pytest.fixture
def no_slab_is_left() -> Iterator[None]:
    before = held_slabs()
    yield
    gc.collect()
    assert held_slabs() <= before


@pytest.fixture(
    params=[
        pytest.param(
            "memfd", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
        ),
        "posix",
    ]
)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_slab_is_zeroed_and_shared(way: str) -> None:
    fd = shm.create_slab(SIZE, way)
    one, other = shm.map_slab(fd, SIZE), shm.map_slab(fd, SIZE)
    os.close(fd)
    assert one[:] == bytes(SIZE)
    one[4097:4100] = b"abc"
    assert other[4096:4101] == b"\0abc\0"


def test_a_slab_has_no_name(way: str) -> None:
    shared = Path("/dev/shm")
    before = sorted(shared.iterdir()) if shared.exists() else []
    fd = shm.create_slab(SIZE, way)
    assert (sorted(shared.iterdir()) if shared.exists() else []) == before
    os.close(fd)


def test_touching_changes_nothing(way: str) -> None:
    fd = shm.create_slab(SIZE, way)
    mapping = shm.map_slab(fd, SIZE)
    os.close(fd)
    content = np.random.default_rng(0).bytes(SIZE)
    mapping[:] = content
    shm.touch(mapping)
    assert mapping[:] == content


def test_a_view_outlives_every_reference_to_its_mapping(way: str) -> None:
    fd = shm.create_slab(SIZE, way)
    mapping = shm.map_slab(fd, SIZE)
    os.close(fd)
    mapping[:3] = b"abc"
    view = memoryview(mapping)
    del mapping
    gc.collect()
    assert bytes(view[:3]) == b"abc"


def test_a_descriptor_that_is_too_small_is_not_mapped(way: str) -> None:
    fd = shm.create_slab(SIZE, way)
    for wrong in (2 * SIZE, 0):
        with pytest.raises(ValueError, match=f"a slab of {wrong} bytes"):
            shm.map_slab(fd, wrong)
    os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="seals exist on Linux only")
def test_nobody_can_shrink_a_sealed_slab() -> None:
    fd = shm.create_slab(SIZE, "memfd")
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS promises memory that it lacks")
def test_no_room_is_an_error_and_leaves_nothing() -> None:
    with pytest.raises(OSError, match="No space left"):
        shm.create_slab(1 << 45, "posix")


def test_names_are_short_enough_for_macos_and_gone_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, str]] = []

    def noted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(path: str, *arguments: object, **named: object) -> object:
            calls.append((name, path))
            return real(path, *arguments, **named)

        return call

    for name in ("shm_open", "shm_unlink"):
        monkeypatch.setattr(_posixshmem, name, noted(name, getattr(_posixshmem, name)))
    os.close(shm.create_slab(SIZE, "posix"))
    (opened, path), (unlinked, same) = calls
    assert (opened, unlinked, path) == ("shm_open", "shm_unlink", same)
    assert len(path) <= 31  # with the slash


def test_the_way_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.SHM, "carrier pigeon")
    with pytest.raises(ValueError, match="MLX_CACHESTORE_SHM: 'carrier pigeon'"):
        shm.create_slab(SIZE)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="Linux only"):
        shm.create_slab(SIZE, "memfd")
