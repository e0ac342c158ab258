import json
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import utils

from engine.backend import Backend
from engine.identity import IdentityError, weights_digest
from engine.model import CONTEXT_TOKENS_DEFAULT, ModelError, ModelSpec, context_tokens, load
from tests.support.models import (
    CONFIGS,
    CONTEXT_TOKENS,
    VOCABULARY_TOKENS,
    llama_config,
    save_tiny_model,
    tiny_llama,
    tiny_model,
)

CPU = Backend("cpu", "test", None)
METAL = Backend("metal", "test", None)


def parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def save_quantized(folder: Path) -> tuple[Path, nn.Module]:
    """A 4-bit model with 16-bit scales, and the model itself."""
    save_tiny_model(folder)
    model = tiny_llama(dtype=mx.float16)
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), parameters(model))
    config = llama_config(quantization={"group_size": 32, "bits": 4})
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def test_a_folder_loads_with_all_that_the_engine_needs_to_know(tmp_path: Path) -> None:
    loaded = load(ModelSpec(str(save_tiny_model(tmp_path / "m"))), CPU)
    assert loaded.architecture == "llama"
    assert loaded.context_tokens == CONTEXT_TOKENS
    assert loaded.vocabulary_tokens == VOCABULARY_TOKENS
    assert len(loaded.tokenizer) < VOCABULARY_TOKENS
    assert loaded.eos_token_ids == (258,)
    assert loaded.dtype == "float32"
    assert not loaded.dequantized
    assert {file.path.name for file in loaded.files} == {"config.json", "model.safetensors"}
    expected, actual = parameters(tiny_llama()), parameters(loaded.model)
    assert expected.keys() == actual.keys()
    assert all(mx.array_equal(expected[name], actual[name]) for name in expected)


def test_a_model_runs_on_the_thread_that_loaded_it(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    outputs: list[list[float]] = []

    def work() -> None:
        try:
            loaded = load(ModelSpec(str(folder)), CPU)
            outputs.append(loaded.model(mx.array([[1, 2, 3]]))[0, -1].tolist())
        finally:
            mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outputs == [tiny_llama()(mx.array([[1, 2, 3]]))[0, -1].tolist()]


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_every_tiny_architecture_loads_and_runs(tmp_path: Path, architecture: str) -> None:
    config = CONFIGS[architecture]()
    loaded = load(ModelSpec(str(save_tiny_model(tmp_path, config))), CPU)
    ids = mx.array([list(range(40))])
    expected = tiny_model(config)(ids)
    assert mx.array_equal(expected, loaded.model(ids))
    assert expected.shape[-1] == loaded.vocabulary_tokens == VOCABULARY_TOKENS


def test_the_cpu_computes_in_float32_from_unrounded_products(tmp_path: Path) -> None:
    folder, model = save_quantized(tmp_path)
    loaded = load(ModelSpec(str(folder)), CPU)
    assert loaded.dequantized
    assert {array.dtype for array in parameters(loaded.model).values()} == {mx.float32}
    layer: Any = model
    layer = layer.model.layers[0].self_attn.q_proj
    scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    expected = mx.dequantize(layer.weight, scales, biases, group_size=32, bits=4)
    assert mx.array_equal(expected, loaded.model.model.layers[0].self_attn.q_proj.weight)


def test_a_gpu_keeps_the_checkpoint_as_it_is(tmp_path: Path) -> None:
    loaded = load(ModelSpec(str(save_quantized(tmp_path)[0])), METAL)
    assert not loaded.dequantized
    assert loaded.dtype == "float16"
    assert isinstance(loaded.model.model.layers[0].self_attn.q_proj, nn.QuantizedLinear)


def test_an_adapter_is_applied_and_stamped(tmp_path: Path) -> None:
    folder, adapter = save_tiny_model(tmp_path / "m"), tmp_path / "adapter"
    adapter.mkdir()
    settings = {
        "fine_tune_type": "lora",
        "num_layers": 1,
        "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    name = "model.layers.1.self_attn.q_proj"
    weights = {f"{name}.lora_a": mx.ones((128, 2)), f"{name}.lora_b": mx.ones((2, 256))}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    plain = load(ModelSpec(str(folder)), CPU)
    adapted = load(ModelSpec(str(folder), adapter), CPU)
    ids = mx.array([[1, 2, 3]])
    assert not mx.allclose(plain.model(ids), adapted.model(ids), atol=1e-3)
    assert {file.role for file in adapted.files} == {"model", "adapter"}


def test_the_digest_is_of_the_files_that_were_loaded(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    loaded = load(ModelSpec(str(folder)), CPU)
    assert len(weights_digest(loaded.files, tmp_path / "memory.json")) == 64
    save_tiny_model(folder, llama_config(layers=3))
    with pytest.raises(IdentityError):
        weights_digest(loaded.files, tmp_path / "memory.json")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "", "~/x y"])
def test_an_unknown_model_is_named_with_what_to_pass(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(ModelSpec(name), CPU)
    message = str(caught.value)
    assert message.startswith(f"--model {name}: no such folder")
    assert "smollm2" in message
    assert "\n" not in message


def test_an_id_that_the_hub_refuses_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("401 Client Error\nlong story")

    monkeypatch.setattr(utils, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"--model a/b: .*\(401 Client Error\)"):
        load(ModelSpec("a/b"), CPU)


def test_folders_that_hold_no_model_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json in that folder"):
        load(ModelSpec(str(tmp_path)), CPU)
    save_tiny_model(tmp_path, llama_config())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="does not load: No safetensors found"):
        load(ModelSpec(str(tmp_path)), CPU)
    save_tiny_model(tmp_path, llama_config())
    (tmp_path / "config.json").write_text(json.dumps(llama_config(model_type="unheard_of")))
    with pytest.raises(ModelError, match="unheard_of not supported"):
        load(ModelSpec(str(tmp_path)), CPU)


def test_the_context_length_is_found_under_its_usual_names() -> None:
    assert context_tokens({"max_position_embeddings": 5}) == 5
    assert context_tokens({"n_positions": 6}) == 6
    assert context_tokens({"text_config": {"max_position_embeddings": 7}}) == 7
    assert context_tokens({"max_position_embeddings": None, "seq_length": 8}) == 8
    assert context_tokens({}) == CONTEXT_TOKENS_DEFAULT
