"""The memory of MLX arrays, for threads and libraries that are not MLX."""

import io
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cachestore.record import ArraySpec


def host_view(array: mx.array, spec: ArraySpec, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The memory of an evaluated array as numpy sees it: writable, not copied.

    Only for arrays that were just made and that MLX never writes to while the view lives: one
    that is updated in place gets new memory, and the view would show what comes to lie in the old.
    """
    memory: Any = array
    return np.frombuffer(memory, spec.numpy_dtype).reshape(shape)


def unwritten(count: int) -> mx.array:
    """An evaluated array of `count` bytes, whatever they are, for a caller who writes all of them.

    MLX has no function for it: `mx.empty` is `mx.zeros`, which takes as long as the copy that
    follows, and several times as long where it is the first to touch the pages. But what MLX loads
    from a file object is new memory that it asks the object to fill, and this one does not.
    """
    file: Any = _Unwritten(count)
    array = mx.load(file, format="npy")
    assert isinstance(array, mx.array)
    return array


class _Unwritten(io.RawIOBase):
    """A file in numpy's format, of which only the header is ever written to a buffer."""

    def __init__(self, count: int) -> None:
        header = io.BytesIO()
        fields = {"descr": "|u1", "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(header, fields)
        self._header = header.getvalue()
        self._bytes = len(self._header) + count
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._bytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        header = self._header[self._position : self._position + len(buffer)]
        memoryview(buffer)[: len(header)] = header
        self._position += len(buffer)
        return len(buffer)
