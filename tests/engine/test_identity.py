import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cachestore.config import LABEL_BYTES_MAX
from engine import config
from engine.identity import (
    SETTLED_NS,
    IdentityError,
    NamespaceParts,
    label,
    namespace,
    stamp_files,
    weights_digest,
)

PARTS = NamespaceParts(
    weights_digest="0" * 64,
    architecture={"model_type": "llama", "num_hidden_layers": 4},
    dtype="float32",
    dequantized=True,
    cache={"kind": "KVCache", "dtype": "float32", "heads": 2},
    codec={"name": "q8", "group": 64, "min_tokens": 256},
    mlx_lm_version="0.32.2",
    record_version=1,
)


def later() -> int:
    """A time at which every file of a test has settled."""
    return 1 << 62


def write_model(folder: Path, weights: bytes = b"weights", layers: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model-00001-of-00002.safetensors").write_bytes(weights)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"more")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    return folder


def digest(folder: Path, memory: Path, adapter: Path | None = None) -> str:
    return weights_digest(stamp_files(folder, adapter), memory, later)


def test_one_bit_at_the_same_path_is_another_identity(tmp_path: Path) -> None:
    folder, memory = tmp_path / "m", tmp_path / "memory.json"
    before = digest(write_model(folder, b"weights"), memory)
    assert digest(folder, memory) == before
    os.utime(folder / "config.json", ns=(1, 1))
    changed = write_model(folder, b"veights")
    os.utime(changed / "model-00001-of-00002.safetensors", ns=(1, 1))
    assert digest(changed, memory) != before


def test_the_same_content_elsewhere_is_the_same_identity(tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    one, other = write_model(tmp_path / "a" / "name"), write_model(tmp_path / "b" / "other")
    assert digest(one, memory) == digest(other, memory)


def test_a_touched_file_is_hashed_again_to_the_same_digest(tmp_path: Path) -> None:
    folder, memory = write_model(tmp_path / "m"), tmp_path / "memory.json"
    before = digest(folder, memory)
    entries = len(json.loads(memory.read_text())["sha256"])
    os.utime(folder / "config.json", ns=(1, 1))
    assert digest(folder, memory) == before
    assert len(json.loads(memory.read_text())["sha256"]) == entries + 1


def test_a_remembered_file_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, memory = write_model(tmp_path / "m"), tmp_path / "memory.json"
    before = digest(folder, memory)
    monkeypatch.setattr("hashlib.file_digest", None)
    assert digest(folder, memory) == before


def test_a_file_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    folder, memory = write_model(tmp_path / "m"), tmp_path / "memory.json"
    for file in folder.iterdir():
        os.utime(file, ns=(10**18, 10**18))
    stamps = stamp_files(folder)
    weights_digest(stamps, memory, lambda: 10**18 + SETTLED_NS)
    assert not memory.exists()
    weights_digest(stamps, memory, lambda: 10**18 + SETTLED_NS + 1)
    assert {stamp.key for stamp in stamps} == set(json.loads(memory.read_text())["sha256"])


def test_files_changed_after_loading_have_no_identity(tmp_path: Path) -> None:
    folder, memory = write_model(tmp_path / "m"), tmp_path / "memory.json"
    stamps = stamp_files(folder)
    write_model(folder, b"other weights")
    with pytest.raises(IdentityError, match="changed after it was loaded"):
        weights_digest(stamps, memory, later)
    assert not memory.exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"sha256": 3}', b'{"sha256": {"1:2:3:4": 5}}', b"\xff\xfe"]
)
def test_a_corrupt_memory_costs_only_a_hash(tmp_path: Path, content: bytes) -> None:
    folder, memory = write_model(tmp_path / "m"), tmp_path / "memory.json"
    before = digest(folder, memory)
    good = memory.read_bytes()
    memory.write_bytes(content)
    assert digest(folder, memory) == before
    assert memory.read_bytes() == good


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = write_model(tmp_path / "m")
    assert digest(folder, tmp_path / "file" / "memory.json") == digest(folder, tmp_path / "ok.json")


def test_adapters_differ_by_content(tmp_path: Path) -> None:
    folder, memory = write_model(tmp_path / "m"), tmp_path / "memory.json"

    def adapter(name: str, weights: bytes) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "adapters.safetensors").write_bytes(weights)
        (path / "adapter_config.json").write_text("{}")
        return path

    none = digest(folder, memory)
    a, b, a_again = adapter("a", b"A"), adapter("b", b"B"), adapter("c", b"A")
    assert len({none, digest(folder, memory, a), digest(folder, memory, b)}) == 3
    assert digest(folder, memory, a) == digest(folder, memory, a_again)


def test_every_part_makes_another_namespace() -> None:
    others = [
        replace(PARTS, weights_digest="1" * 64),
        replace(PARTS, architecture={"model_type": "llama", "num_hidden_layers": 3}),
        replace(PARTS, dtype="bfloat16"),
        replace(PARTS, dequantized=False),
        replace(PARTS, cache={**PARTS.cache, "dtype": "float16"}),
        replace(PARTS, codec={**PARTS.codec, "min_tokens": 512}),
        replace(PARTS, mlx_lm_version="0.32.3"),
        replace(PARTS, record_version=2),
    ]
    names = {namespace(parts) for parts in [PARTS, *others]}
    assert len(names) == 1 + len(others)
    assert all(len(name) == 32 for name in names)
    reordered = replace(PARTS, codec=dict(reversed([*PARTS.codec.items()])))
    assert namespace(reordered) == namespace(PARTS)


def test_processes_agree_whatever_their_hash_seed() -> None:
    script = (
        "from tests.engine.test_identity import PARTS; from engine.identity import namespace;"
        "print(namespace(PARTS).hex())"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert names == {namespace(PARTS).hex()}


def test_a_label_is_short_whatever_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.LABEL_BYTES_MAX == LABEL_BYTES_MAX
    deep = tmp_path / ("d" * 200) / ("e" * 200) / "Qwen3"
    deep.mkdir(parents=True)
    assert label(str(deep)) == "Qwen3"
    monkeypatch.chdir(deep)
    assert label(".") == "Qwen3"
    assert label("mlx-community/Qwen3-0.6B-4bit") == "mlx-community/Qwen3-0.6B-4bit"
    assert label("smollm2") == "smollm2"
    # 3 bytes each: cut between two of them.
    assert label("日" * 100) == "日" * 85
    assert label("caf\udcff") == "caf?"
