"""MLX's backend: checked, and helped to a fast BLAS, before MLX is first imported.

Every entry point of the engine calls `prepare` before anything imports `mlx.core`: symbols are
bound when MLX is loaded, so a library that is to replace its bundled BLAS must come first.
"""

import ctypes
import functools
import logging
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

log = logging.getLogger(__name__)

# Extra of this distribution -> wheel. All of them install the same mlx/lib/libmlx.so.
WHEELS = {"cpu": "mlx-cpu", "cuda12": "mlx-cuda-12", "cuda13": "mlx-cuda-13"}

# The names of Debian and Fedora (threads, OpenMP). 64-bit-integer builds have another ABI.
OPENBLAS_NAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblaso.so.0", "libopenblas.so")

OPENBLAS_MISSING = (
    "OpenBLAS was not found: MLX's own BLAS multiplies matrices about 70 times slower"
)
OPENBLAS_ADVICE = "On Debian and Ubuntu: apt install libopenblas0-pthread"

CPU_CACHE_BYTES = 2 << 30
METAL_CACHE_BYTES_MAX = 2 << 30

Name = Literal["cpu", "metal", "cuda"]


class BackendError(Exception):
    """MLX cannot run as installed; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Backend:
    name: Name
    device_name: str
    # What the device can hold without paging; None where MLX does not say (CPU).
    working_set_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    # Freed buffers that MLX keeps for reuse.
    cache_bytes: int | None
    # Memory pinned for the GPU. Not 0 only by choice: concurrent streams with cache churn and a
    # wired limit are what panics macOS kernels (mlx#3186).
    wired_bytes: int = 0


@functools.cache
def prepare() -> None:
    """Idempotent. Raises BackendError unless exactly one backend of MLX is installed, whole."""
    assert "mlx.core" not in sys.modules, "prepare() must run before the first import of mlx.core"
    if sys.platform == "darwin":
        return
    if installed_wheel() == WHEELS["cpu"]:
        if find_openblas() is None:
            log.warning("%s. %s", OPENBLAS_MISSING, OPENBLAS_ADVICE)
    else:
        # A cache is written to in place only when no kernel that reads it is still on its way.
        # MLX lets the host run ahead by whole steps on large cards, and then copies it instead.
        os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "25")


def load() -> None:
    """Import MLX, after `prepare`. Raises BackendError when its library does not load."""
    try:
        import mlx.core  # noqa: PLC0415, F401
    except (ImportError, OSError) as error:
        raise BackendError(
            f"MLX does not load: {error}; the CUDA backends need NVIDIA's driver, "
            "mlx-cachestore[cpu] needs none"
        ) from error


def describe() -> Backend:
    """What MLX computes on. Imports MLX."""
    import mlx.core as mx  # noqa: PLC0415

    info = mx.device_info()
    name: Name = "cpu"
    if mx.default_device().type == mx.DeviceType.gpu:
        name = "metal" if mx.metal.is_available() else "cuda"
    working_set = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return Backend(
        name=name,
        device_name=str(info.get("device_name", name)),
        working_set_bytes=int(working_set) if working_set else None,
    )


def memory_limits(backend: Backend, wired_bytes: int = 0) -> MemoryLimits:
    """Raises BackendError for a wired limit that the device does not have."""
    if wired_bytes and backend.name != "metal":
        raise BackendError(
            f"--wired-limit would have no effect: {backend.name} wires no memory; leave it out"
        )
    if backend.working_set_bytes is not None and wired_bytes > backend.working_set_bytes:
        raise BackendError(
            f"--wired-limit {wired_bytes}: give at most {backend.working_set_bytes} bytes, "
            "which is what the device recommends"
        )
    cache_bytes = None
    if backend.name == "cpu":
        # The default of 32 MB page-faults every large buffer anew: 1.5 GB/s instead of 13.
        cache_bytes = CPU_CACHE_BYTES
    elif backend.name == "metal" and backend.working_set_bytes:
        # The default is no limit, on a machine whose memory the cachestore shares.
        cache_bytes = min(METAL_CACHE_BYTES_MAX, backend.working_set_bytes // 20)
    return MemoryLimits(cache_bytes=cache_bytes, wired_bytes=wired_bytes)


def apply_memory_limits(limits: MemoryLimits) -> None:
    """On the MLX thread. Each BatchGenerator raises the wired limit unasked: see Batch."""
    import mlx.core as mx  # noqa: PLC0415

    if limits.cache_bytes is not None:
        mx.set_cache_limit(limits.cache_bytes)
    mx.set_wired_limit(limits.wired_bytes)


def release_memory() -> None:
    """Give back to the system what is kept of freed arrays for the next ones. On the MLX thread."""
    import mlx.core as mx  # noqa: PLC0415

    mx.clear_cache()
    # MLX's CPU backend has its arrays from malloc, and glibc's keeps what is free, too.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def installed_wheel() -> str:
    """The backend of MLX on Linux. Raises BackendError unless it is exactly one, and whole; the
    message says what is wrong, a colon, and what to do."""
    found = [wheel for wheel in WHEELS.values() if version(wheel)]
    if not found:
        raise BackendError(
            "MLX has no backend: pip install 'mlx-cachestore[cpu]' (or cuda12, cuda13)"
        )
    if len(found) > 1:
        raise BackendError(
            f"{' and '.join(found)} overwrite each other's library: "
            f"pip uninstall -y {' '.join(found)}, then pip install one of them alone"
        )
    wheel = found[0]
    if version(wheel) != version("mlx"):
        raise BackendError(
            f"mlx {version('mlx')} does not fit {wheel} {version(wheel)}: "
            f"pip install {wheel}=={version('mlx')}"
        )
    # Gone when another backend, installed over this one, was uninstalled again.
    if not Path(str(metadata.distribution(wheel).locate_file("mlx/lib/libmlx.so"))).is_file():
        raise BackendError(
            f"{wheel} has lost its library: "
            f"pip install --force-reinstall --no-deps {wheel}=={version(wheel)}"
        )
    return wheel


def has_driver() -> bool:
    """Whether NVIDIA's library is there, which the CUDA backends need."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def version(distribution: str) -> str | None:
    """Of an installed distribution; None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def find_openblas() -> str | None:
    """The name under which it was found, and is loaded now."""
    for name in OPENBLAS_NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None
