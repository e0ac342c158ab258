"""Slabs: anonymous shared memory that lives as long as somebody holds or maps it.

A slab has no name once `create_slab` returns, so whatever dies, and however, nothing is left
behind. Linux has memfd for that. macOS has only named POSIX segments, which are unlinked at
once; that way works on Linux too, and is tested there, because it is what a Mac runs.

multiprocessing.shared_memory is not used: its resource tracker unlinks the segment of another
process as soon as a mere reader exits.
"""

import _posixshmem  # type: ignore[import-not-found]  # no stub
import fcntl
import mmap
import os
import secrets
import sys

import numpy as np

from cachestore import variables


def way_chosen() -> str:
    """By the environment, or else by the system. Raises ValueError for one that is not here."""
    default = "memfd" if sys.platform == "linux" else "posix"
    way = os.environ.get(variables.SHM) or default
    if way not in ("memfd", "posix"):
        raise ValueError(f"{variables.SHM}: {way!r} is neither memfd nor posix")
    if way == "memfd" and sys.platform != "linux":
        raise ValueError(f"{variables.SHM}: memfd exists on Linux only")
    return way


def create_slab(size: int, way: str | None = None) -> int:
    """Makes a slab of `size` bytes, all pages in place, and returns its descriptor.

    Takes about 0.1 s for 256 MiB without the GIL: call it off the event loop. Raises OSError
    (ENOSPC, ENOMEM) when the system has no room for it.
    """
    assert size > 0
    way = way or way_chosen()
    fd = _create_memfd() if way == "memfd" else _create_posix()
    try:
        if way == "posix":
            os.ftruncate(fd, size)  # macOS allows exactly one
        if sys.platform == "linux":
            # Without it a full system shows as SIGBUS at a client's first write.
            os.posix_fallocate(fd, 0, size)
        if way == "posix":
            _populate(fd, size)
        else:
            _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_slab(fd: int, size: int) -> mmap.mmap:
    """Maps a slab whole, for reading and writing. The descriptor may be closed afterwards.

    The mapping is undone when the last view of it is gone, never by a call: a view must not
    outlive its memory. Raises ValueError when the descriptor holds less than `size`.
    """
    held = os.fstat(fd).st_size  # macOS rounds it up to whole pages
    if not 0 < size <= held:
        raise ValueError(f"a slab of {size} bytes comes with a descriptor of {held} bytes")
    return mmap.mmap(fd, size)


def touch(mapping: mmap.mmap) -> None:
    """Reads each page once, without the GIL, so that a first copy meets no page faults."""
    pages = np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE]
    pages.max()


def _create_memfd() -> int:
    if sys.platform != "linux":
        raise ValueError(f"{variables.SHM}: memfd exists on Linux only")
    return os.memfd_create("mlx-cachestore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _create_posix() -> int:
    # At most 30 characters on macOS. No O_CLOEXEC: newer macOS refuses it, and the kernel
    # closes segments on exec anyway.
    name = "/mlxcs" + secrets.token_hex(10)
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd


def _populate(fd: int, size: int) -> None:
    """Writes to each page once: macOS has no other way to put them in place."""
    pages = np.frombuffer(mmap.mmap(fd, size), np.uint8)[:: mmap.PAGESIZE]
    pages[:] = 0


def _seal(fd: int) -> None:
    """Nobody who gets the descriptor can pull the pages from under the others."""
    if sys.platform == "linux":
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
