"""Loads a model. Everything here runs on the MLX thread."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import utils as typed_utils
from mlx_lm.models.cache import make_prompt_cache

from engine import smollm2
from engine.backend import Backend
from engine.identity import FileStamp, stamp_files

log = logging.getLogger(__name__)

# mlx-lm says that it is typed, but is not throughout.
utils: Any = typed_utils

# For models that state no limit, recurrent ones mostly.
CONTEXT_TOKENS_DEFAULT = 32_768
CONTEXT_NAMES = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "n_positions",
    "n_ctx",
)
# Models of several modalities keep the language model's configuration inside.
NESTED_NAMES = ("text_config", "language_config", "llm_config")

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

CHOICES = (
    f"pass a folder with config.json and model*.safetensors, a Hugging Face id like "
    f"mlx-community/Qwen3-0.6B-4bit, or {smollm2.ALIAS}"
)


class ModelError(Exception):
    """The model cannot be loaded; the message names the flag and says what to pass."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    # A folder, a Hugging Face id, or the alias of a model that needs no hub.
    name: str
    adapter: Path | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    # mlx_lm's Model and TokenizerWrapper.
    model: Any
    tokenizer: Any
    name: str
    folder: Path
    # Every file that the weights and the configuration came from, as it was before loading.
    files: tuple[FileStamp, ...]
    config: Mapping[str, Any]
    architecture: str
    context_tokens: int
    # Ids below this have an embedding; the tokenizer may know fewer.
    vocabulary_tokens: int
    eos_token_ids: tuple[int, ...]
    # Dtype that most floating-point weights have.
    dtype: str
    dequantized: bool


def load(spec: ModelSpec, backend: Backend) -> LoadedModel:
    """Evaluated, ready to run. On the CPU weights become float32, which alone has a fast BLAS.

    Raises ModelError.
    """
    folder = resolve(spec.name)
    flags = f"--model {spec.name}" + (f" --adapter-path {spec.adapter}" if spec.adapter else "")
    files = stamp_files(folder, spec.adapter)
    try:
        model, config = utils.load_model(folder, lazy=True)
        if spec.adapter is not None:
            model = utils.load_adapters(model, str(spec.adapter))
            model.eval()
        dequantized = backend.name == "cpu" and _to_float32(model)
        mx.eval(model.parameters())
        tokenizer = utils.load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
        vocabulary_tokens = _vocabulary_tokens(model)
    except Exception as error:  # Files of others: there is no end to what they can lack.
        raise ModelError(f"{flags} does not load: {_one_line(error)}") from error

    parameters: Any = tree_flatten(model.parameters())
    weights = [array for _, array in parameters]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=spec.name,
        folder=folder,
        files=files,
        config=config,
        architecture=str(config["model_type"]),
        context_tokens=context_tokens(config),
        vocabulary_tokens=vocabulary_tokens,
        eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)),
        dtype=_dtype(weights),
        dequantized=dequantized,
    )


def resolve(name: str) -> Path:
    """The folder of a model, fetched first where need be. Raises ModelError."""
    if name == smollm2.ALIAS:
        try:
            return smollm2.folder()
        except smollm2.FetchError as error:
            raise ModelError(f"--model {name}: {error}") from error
    folder = Path(name).expanduser()
    if name and os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        if not (folder / "config.json").is_file():
            raise ModelError(f"--model {name}: no config.json in that folder; {CHOICES}")
        return folder
    if not HUB_ID.fullmatch(name):
        raise ModelError(f"--model {name}: no such folder; {CHOICES}")
    try:
        return Path(utils.snapshot_download(name, allow_patterns=utils.DEFAULT_ALLOW_PATTERNS))
    except Exception as error:  # The hub's client has no common base for its errors.
        raise ModelError(
            f"--model {name}: no such folder, and the hub did not give it "
            f"({_one_line(error)}); {CHOICES}"
        ) from error


def context_tokens(config: Mapping[str, Any]) -> int:
    nested = [config[name] for name in NESTED_NAMES if isinstance(config.get(name), Mapping)]
    for part in (config, *nested):
        for name in CONTEXT_NAMES:
            if isinstance(part.get(name), int) and part[name] > 0:
                return int(part[name])
    log.info("The model states no context length: %d tokens are allowed", CONTEXT_TOKENS_DEFAULT)
    return CONTEXT_TOKENS_DEFAULT


def _to_float32(model: Any) -> bool:
    """Whether anything was dequantized. Scales are cast first, so that no product is rounded to
    their 16 bits."""
    quantized = [module for _, module in model.named_modules() if "scales" in module]
    if any("global_scale" in module for module in quantized):
        raise ValueError("weights with a global scale (nvfp4) are not supported on the CPU")
    model.set_dtype(mx.float32)
    utils.dequantize_model(model)
    model.set_dtype(mx.float32)
    return bool(quantized)


def _vocabulary_tokens(model: Any) -> int:
    """From the shape of logits, which needs no evaluation."""
    return int(model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1])


def _dtype(weights: list[Any]) -> str:
    bytes_by_dtype: dict[mx.Dtype, int] = {}
    for array in weights:
        if mx.issubdtype(array.dtype, mx.floating):
            bytes_by_dtype[array.dtype] = bytes_by_dtype.get(array.dtype, 0) + array.nbytes
    most = max(bytes_by_dtype, key=lambda dtype: bytes_by_dtype[dtype])
    return str(most).removeprefix("mlx.core.")


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
