from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cachestore.client import MatchKind
from engine.batch import BatchMode
from engine.kv.history import BatchKVCache
from engine.kvconfig import KvConfig
from engine.selfcheck import SelfCheckFailed, check_bounded, choose_mode
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import assert_same, in_process
from tests.support.models import (
    VOCABULARY_TOKENS,
    Config,
    gemma3_config,
    gpt_bigcode_config,
    lfm2_config,
    llama4_config,
    mamba2_config,
    nemotron_h_config,
    qwen3_next_config,
    save_tiny_model,
    tiny_llama,
)
from tests.support.zoo import animal


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_noise_of_16_bits_is_not_taken_for_an_error(dtype: mx.Dtype) -> None:
    model = tiny_llama(dtype=dtype)
    assert choose_mode(model, VOCABULARY_TOKENS) is BatchMode.BATCHED


@pytest.mark.parametrize("name", ["cohere2", "muse_glimmer"])
def test_noise_of_16_bits_is_measured_where_it_is_larger(name: str) -> None:
    """They scale their logits, and are 2 to 7 % off in bfloat16 however they run."""
    assert choose_mode(animal(name, mx.bfloat16), VOCABULARY_TOKENS) is BatchMode.BATCHED


@pytest.mark.parametrize("name", ["gemma2", "mamba", "nemotron_h", "rwkv7", "olmo_hybrid"])
def test_what_is_wrong_in_a_batch_is_so_in_16_bits(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, coarse = animal(name), animal(name, mx.bfloat16)
    mode = choose_mode(model, VOCABULARY_TOKENS)
    assert mode is not BatchMode.BATCHED
    assert choose_mode(coarse, VOCABULARY_TOKENS) is mode
    assert "batch mode batched would be wrong" in caplog.text


@pytest.mark.parametrize("vocabulary_tokens", [1, 2, VOCABULARY_TOKENS])
def test_any_vocabulary_will_do(vocabulary_tokens: int) -> None:
    assert choose_mode(tiny_llama(), vocabulary_tokens) is BatchMode.BATCHED


class Wrapped:
    """A llama that is wrong on purpose: `change` gets its logits and caches after each forward."""

    def __init__(self, change: Callable[[mx.array, list[Any]], mx.array]) -> None:
        self._model = tiny_llama()
        self._change = change

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        return self._change(self._model(inputs, cache=cache), cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def padded(cache: list[Any]) -> bool:
    """Whether this forward is of rows that are padded on the right."""
    return bool(getattr(cache[0], "_unpadded", ()))


def wrong_row(logits: mx.array, error: float) -> mx.array:
    """The last row's best token and another one change by this much."""
    change = mx.zeros(logits.shape)
    change[-1, :, 5] = error
    return logits + change


@pytest.mark.parametrize("error", [1.0, float("nan"), float("inf")])
def test_wrong_in_a_batch_is_one_row(error: float) -> None:
    model = Wrapped(lambda logits, _: wrong_row(logits, error) if len(logits) > 1 else logits)
    assert choose_mode(model, VOCABULARY_TOKENS) is BatchMode.ONE_ROW


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_wrong_when_padded_is_one_prompt_at_a_time(error: float) -> None:
    def change(logits: mx.array, cache: list[Any]) -> mx.array:
        if padded(cache):
            (keys, values), *others = cache[0].state
            cache[0].state = (keys, values + error), *others
        return logits

    assert choose_mode(Wrapped(change), VOCABULARY_TOKENS) is BatchMode.PREFILL_ONE


def test_attention_to_the_padding_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # The commonest way to be silently wrong: a mask that forgets which columns are padding.
    def forgetful(logits: mx.array, cache: list[Any]) -> mx.array:
        for layer in cache:
            if isinstance(layer, BatchKVCache):
                arrays, ends, precision = layer.state
                layer.state = arrays, [max(ends)] * len(ends), precision
        return logits

    mode = choose_mode(Wrapped(forgetful), VOCABULARY_TOKENS)
    assert mode is not BatchMode.BATCHED


def test_logits_that_are_masked_on_purpose_are_no_error() -> None:
    def mask(logits: mx.array, _: list[Any]) -> mx.array:
        masked = mx.array(logits)
        masked[..., 200:] = -mx.inf
        return masked

    assert choose_mode(Wrapped(mask), VOCABULARY_TOKENS) is BatchMode.BATCHED


def test_a_model_that_is_never_the_same_is_refused() -> None:
    calls = [0]

    def drift(logits: mx.array, _: list[Any]) -> mx.array:
        calls[0] += 1
        return logits * (1 + 0.1 * calls[0])

    with pytest.raises(SelfCheckFailed, match="--model"):
        choose_mode(Wrapped(drift), VOCABULARY_TOKENS)


def test_layers_that_count_rows_cannot_be_bounded() -> None:
    for name in ("llama", "gemma3_text", "qwen3_next"):
        check_bounded(animal(name), VOCABULARY_TOKENS)
    with pytest.raises(SelfCheckFailed, match=r"--max-kv-size: .* leave it out"):
        check_bounded(animal("afm7"), VOCABULARY_TOKENS)


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    with pytest.raises(SelfCheckFailed, match="--model"):
        choose_mode(Wrapped(lambda logits, _: logits * mx.nan), VOCABULARY_TOKENS)


# --- served as they can be, and cached as they can be --------------------------------------------


KINDS: dict[str, Callable[[], Config]] = {
    "gemma3_text": gemma3_config,
    "mamba2": mamba2_config,
    "qwen3_next": qwen3_next_config,
    "lfm2": lfm2_config,
    "llama4": llama4_config,
    "nemotron_h": nemotron_h_config,
}
MODES = {"llama4": BatchMode.ONE_ROW, "nemotron_h": BatchMode.PREFILL_ONE}
PROMPTS = [[(11 * n + n * n * seed) % 256 for n in range(20 * seed)] for seed in (1, 3, 4)]
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def store() -> Iterator[Cachestore]:
    with short_directory() as directory, start_cachestore(directory) as daemon:
        yield daemon


@pytest.mark.parametrize("name", KINDS)
def test_a_model_generates_the_same_in_its_mode_cold_and_from_checkpoints(
    directory: Path, store: Cachestore, name: str
) -> None:
    model = save_tiny_model(directory / "model", KINDS[name]())
    with in_process(model, store.socket, cache_codec="none") as engine:
        assert engine.engine.served is not None
        assert engine.engine.served.batch_mode == MODES.get(name, BatchMode.BATCHED).value
        expected = [engine.alone(tokens, max_tokens=6) for tokens in PROMPTS]
        for cached in (0, 1):
            together = [engine.submit(tokens, max_tokens=6) for tokens in PROMPTS]
            for request_id, tokens, cold in zip(together, PROMPTS, expected, strict=True):
                reply = engine.finish(request_id)
                assert_same(reply, cold, TOLERANCE)
                assert reply.done.usage.cached_tokens == cached * (len(tokens) - 1)
            engine.settle()
        for tokens, cold in zip(PROMPTS, expected, strict=True):
            reply = engine.ask(tokens, max_tokens=6)
            assert_same(reply, cold, TOLERANCE)
            assert reply.done.usage.cached_tokens == len(tokens) - 1


def test_a_model_that_is_not_cached_keeps_no_store_awake(
    directory: Path, cachestore: Cachestore
) -> None:
    model = save_tiny_model(directory / "model")
    late = KvConfig((8, 8), quantized_start=40)
    with in_process(model, cachestore.socket, kv=late, max_batch=1) as engine:
        reply = engine.ask(PROMPTS[0], max_tokens=1, warm=True)
        assert (reply.done.stored_tokens, reply.done.usage.match) == (0, None)
        assert cachestore.stats().sessions == 0


def test_one_row_at_a_time_is_cached_too(directory: Path, cachestore: Cachestore) -> None:
    model = save_tiny_model(directory / "model", gpt_bigcode_config())
    with in_process(model, cachestore.socket, cache_codec="none") as engine:
        for tokens in PROMPTS:
            expected = engine.alone(tokens, max_tokens=6)
            assert_same(engine.ask(tokens, max_tokens=6), expected, TOLERANCE)
            engine.settle()
            hit = engine.ask(tokens, max_tokens=6)
            assert_same(hit, expected, TOLERANCE)
            assert hit.done.usage.match is MatchKind.EXACT
            assert hit.done.usage.cached_tokens == len(tokens) - 1
        longer = [*PROMPTS[2], 7, 7]
        together = [engine.submit(tokens, max_tokens=6) for tokens in (longer, *PROMPTS)]
        for request_id, tokens in zip(together, (longer, *PROMPTS), strict=True):
            reply = engine.finish(request_id)
            assert_same(reply, engine.alone(tokens, max_tokens=6), TOLERANCE)
            assert reply.done.usage.cached_tokens >= len(tokens) - 2
