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
