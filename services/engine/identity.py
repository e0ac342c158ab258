"""Identity is content (docs/architecture.md): entries are shared only between engines that would
compute the same rows, whatever the model is called and wherever it lies."""

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config import LABEL_BYTES_MAX

MEMORY_FILE = "weights-digests.json"
MEMORY_ENTRIES_MAX = 4096

# A file written again within the granularity of its clock keeps its time of modification, so a
# digest of a file this young is not remembered.
SETTLED_NS = 2_000_000_000

# What mlx-lm reads of a model and an adapter, apart from the tokenizer: ids are the keys.
MODEL_FILES = (
    "model*.safetensors",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
)
ADAPTER_FILES = ("adapters.safetensors", "adapter_config.json")


class IdentityError(Exception):
    """The files are no longer those that were loaded."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """One file as it was when it was loaded; role is "model" or "adapter"."""

    role: str
    path: Path
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @property
    def key(self) -> str:
        return f"{self.device}:{self.inode}:{self.size_bytes}:{self.mtime_ns}"


@dataclass(frozen=True, slots=True)
class NamespaceParts:
    weights_digest: str
    # The configuration that the model was built from.
    architecture: Mapping[str, Any]
    # Dtype computed with, and whether quantized weights were dequantized for it.
    dtype: str
    dequantized: bool
    # Dtype and layout of every layer's cache; opaque here, as is the codec policy.
    cache: Mapping[str, Any]
    codec: Mapping[str, Any]
    mlx_lm_version: str
    record_version: int


def stamp_files(folder: Path, adapter: Path | None = None) -> tuple[FileStamp, ...]:
    """Take it before loading: `weights_digest` then proves that it hashed what was loaded."""
    stamps = [_stamp("model", path) for path in _matching(folder, MODEL_FILES)]
    if adapter is not None:
        stamps += [_stamp("adapter", path) for path in _matching(adapter, ADAPTER_FILES)]
    return tuple(stamps)


def weights_digest(
    stamps: tuple[FileStamp, ...],
    remembered: Path,
    now_ns: Callable[[], int] = time.time_ns,
) -> str:
    """SHA-256 in hex over every byte of the files, remembered in the JSON file `remembered`.

    Hashing releases the GIL. Raises IdentityError when a file changed since it was stamped, and
    OSError when it cannot be read.
    """
    memory = _recall(remembered)
    digests: dict[str, str] = {}
    for stamp in stamps:
        digests[stamp.key] = memory.get(stamp.key) or _hash_file(stamp.path)
    total = hashlib.sha256()
    for stamp in stamps:
        if _stamp(stamp.role, stamp.path) != stamp:
            raise IdentityError(f"{stamp.path} changed after it was loaded: restart the engine")
        total.update(f"{stamp.role}/{stamp.path.name} {digests[stamp.key]}\n".encode())

    settled_before_ns = now_ns() - SETTLED_NS
    settled = {s.key: digests[s.key] for s in stamps if s.mtime_ns < settled_before_ns}
    if not settled.items() <= memory.items():
        _remember(remembered, memory | settled)
    return total.hexdigest()


def namespace(parts: NamespaceParts) -> bytes:
    """32 bytes. Raises TypeError or ValueError for parts that have no canonical JSON."""
    text = json.dumps(asdict(parts), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


def label(model: str) -> str:
    """What a namespace is called in the cachestore's statistics: a folder by its own name."""
    folder = Path(model).expanduser()
    # Path.is_dir raises for a name that is too long.
    name = folder.resolve().name if os.path.isdir(folder) else model
    # A name with bytes that are not UTF-8 has surrogates, which do not encode.
    return name.encode(errors="replace")[:LABEL_BYTES_MAX].decode(errors="ignore")


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def _stamp(role: str, path: Path) -> FileStamp:
    status = path.stat()
    return FileStamp(role, path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _recall(path: Path) -> dict[str, str]:
    """Empty when there is nothing to recall, or nothing readable: digests are then computed."""
    try:
        memory = json.loads(path.read_bytes())["sha256"]
        return {
            key: digest for key, digest in memory.items() if re.fullmatch("[0-9a-f]{64}", digest)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(path: Path, memory: dict[str, str]) -> None:
    """Replaces the file at once; of two engines that write together, one is forgotten."""
    newest = dict(list(memory.items())[-MEMORY_ENTRIES_MAX:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    except OSError:
        return
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"sha256": newest}, file, indent=1)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
