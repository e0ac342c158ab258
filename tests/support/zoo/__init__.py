"""A tiny random model of every architecture of mlx-lm whose cache is of a kind of its own.

By mlx-lm's name of the architecture, in the order of the files: plain rows and rows of another
form, windows, recurrent states. All windows (and chunks) are of WINDOW tokens, and all widths of
rows can be quantized. `tests/engine/test_zoo.py` proves that a wrong row or state shows in the
logits, and that no architecture of the installed mlx-lm is forgotten.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from tests.support.models import Config, tiny_model
from tests.support.zoo.recurrent import RECURRENT
from tests.support.zoo.rows import ROWS
from tests.support.zoo.windows import WINDOWS

ZOO: dict[str, Callable[[], Config]] = {**ROWS, **WINDOWS, **RECURRENT}

# Their attention is a Metal kernel: nothing of them runs elsewhere.
METAL_ONLY = ("muse_spark",)
# Their text model is one of the zoo, and its caches are theirs.
WRAPPERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "lfm2-vl": "lfm2"}
# Their model is one of the zoo, by inheritance, and so are their caches.
HEIRS = {
    "glm_moe_dsa": "deepseek_v32",
    "qwen3_5_moe": "qwen3_5",
    "prism_hadamard_qwen35": "qwen3_5",
}


def animal(name: str, dtype: mx.Dtype = mx.float32) -> Any:
    """The model, evaluated on the calling thread; always with the same weights."""
    return tiny_model(ZOO[name](), dtype=dtype)
