"""The gRPC service of a real daemon, as a client sees it."""

import time
from typing import Any

import grpc
import pytest
from mlx_lm import utils

from engine import config
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc
from tests.support.engines import chat, ids
from tests.support.models import (
    CONTEXT_TOKENS,
    TOKENIZER_TOKENS,
    VOCABULARY_TOKENS,
)
from tests.support.served import LONG_REPLY, Served, refusal, tokenize
from tests.support.waiting import until

EOS = 258


@pytest.fixture(scope="module")
def tokenizer(served: Served) -> Any:
    return utils.load_tokenizer(served.model)


PROMPTS = {
    "text": pb.Prompt(text="Once upon a time 🚢"),
    "chat": chat(("system", "You are brief."), ("user", "Wie heißt du?")),
    "ids": ids([5, 6, 7, VOCABULARY_TOKENS - 1]),
}


@pytest.mark.parametrize("form", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_is_deltas_and_then_done(
    served: Served, tokenizer: Any, form: str, temperature: float
) -> None:
    sampling = pb.Sampling(temperature=temperature, seed=1)
    request = pb.GenerateRequest(
        prompt=PROMPTS[form], max_tokens=40, ignore_eos=True, sampling=sampling
    )
    began = time.monotonic()
    *deltas, last = served.stub.Generate(request)
    wall_ms = 1000 * (time.monotonic() - began)
    assert all(message.HasField("delta") for message in deltas)
    tokens = [token for message in deltas for token in message.delta.token_ids]
    text = "".join(message.delta.text for message in deltas)
    assert text == tokenizer.decode(tokens)
    done = last.done
    assert done.finish_reason == pb.FINISH_REASON_LENGTH
    assert done.stop == ""
    assert done.usage.completion_tokens == len(tokens) == 40
    assert done.usage.prompt_tokens == len(tokenize(served, PROMPTS[form]))
    timing = done.timing
    parts = [
        timing.queue_ms,
        timing.lookup_ms,
        timing.attach_ms,
        timing.prefill_ms,
        timing.decode_ms,
    ]
    assert all(part >= 0 for part in parts)
    assert timing.prefill_ms > 0
    assert timing.decode_ms > 0
    assert sum(parts) <= wall_ms


def test_the_forms_of_one_prompt_are_the_same(served: Served) -> None:
    for form in ("text", "chat"):
        tokens = tokenize(served, PROMPTS[form])
        assert tokenize(served, ids(tokens)) == tokens
        reply = served.generate(prompt=PROMPTS[form], max_tokens=8)[:2]
        assert served.generate(prompt=ids(tokens), max_tokens=8)[:2] == reply


def test_the_length_is_what_the_context_leaves(served: Served) -> None:
    prompt = ids([3] * (CONTEXT_TOKENS - 48))
    for fields in ({}, {"max_tokens": 48}):
        tokens, _, done = served.generate(prompt=prompt, ignore_eos=True, **fields)
        assert len(tokens) == 48
        assert done.finish_reason == pb.FINISH_REASON_LENGTH
    longest = ids([3] * (CONTEXT_TOKENS - 1))
    assert len(served.generate(prompt=longest, ignore_eos=True)[0]) == 1
    roomy = served.generate(prompt=ids([3]), ignore_eos=True)[2]
    assert roomy.usage.completion_tokens == config.MAX_TOKENS_DEFAULT


def test_a_seed_can_be_repeated_whatever_else_runs(served: Served) -> None:
    def sampled(seed: int) -> list[int]:
        sampling = pb.Sampling(temperature=1.0, top_p=0.95, min_p=0.001, top_k=200, seed=seed)
        return served.generate(
            prompt=ids([9, 8, 7]), max_tokens=60, ignore_eos=True, sampling=sampling
        )[0]

    alone = sampled(1)
    others = [served.stream(sampling=pb.Sampling(temperature=1.0)) for _ in range(3)]
    for stream in others:
        next(stream)
    assert sampled(1) == alone
    for stream in others:
        stream.cancel()
    assert sampled(2) != alone


def test_stop_strings(served: Served, tokenizer: Any) -> None:
    sampling = pb.Sampling(temperature=2.0, seed=4)
    fields: dict[str, Any] = {
        "prompt": ids([1, 2, 3]),
        "max_tokens": 80,
        "ignore_eos": True,
        "sampling": sampling,
    }
    tokens, text, _ = served.generate(**fields)
    stop = text[30:34]
    at = text.index(stop)
    cut, before, done = served.generate(**fields, stop=["not in there at all", stop])
    assert before == text[:at]
    assert (done.stop, done.finish_reason) == (stop, pb.FINISH_REASON_STOP)
    assert cut == tokens[: len(cut)]
    assert stop in tokenizer.decode(cut)
    assert done.usage.completion_tokens == len(cut)


def test_stop_tokens(served: Served) -> None:
    sampling = pb.Sampling(temperature=2.0, seed=5)
    fields: dict[str, Any] = {"prompt": ids([1, 2, 3]), "max_tokens": 40, "sampling": sampling}
    tokens, _, _ = served.generate(**fields, ignore_eos=True)
    stop = tokens[10]
    cut, _, done = served.generate(**fields, ignore_eos=True, stop_token_ids=[stop])
    assert cut == tokens[: tokens.index(stop)]
    assert (done.stop, done.finish_reason) == ("", pb.FINISH_REASON_STOP)
    assert done.usage.completion_tokens == len(cut) + 1


def test_the_models_own_end_ends_a_reply_unless_it_is_ignored(served: Served) -> None:
    for seed in range(100):
        fields: dict[str, Any] = {
            "prompt": ids([1, 2, 3]),
            "max_tokens": 100,
            "sampling": pb.Sampling(temperature=100.0, seed=seed),
        }
        tokens, text, done = served.generate(**fields, ignore_eos=True)
        assert done.finish_reason == pb.FINISH_REASON_LENGTH
        if EOS in tokens:
            break
    assert "<|im_end|>" in text
    cut, text, done = served.generate(**fields)
    assert cut == tokens[: tokens.index(EOS)]
    assert "<|im_end|>" not in text
    assert done.finish_reason == pb.FINISH_REASON_STOP


def test_ids_that_the_tokenizer_does_not_know_are_prompt_and_reply_too(served: Served) -> None:
    # The embedding is larger than the vocabulary, as that of many models is.
    tokens, _, done = served.generate(
        prompt=ids([TOKENIZER_TOKENS, VOCABULARY_TOKENS - 1]),
        max_tokens=100,
        ignore_eos=True,
        sampling=pb.Sampling(temperature=100.0, seed=1),
    )
    assert max(tokens) >= TOKENIZER_TOKENS
    assert done.usage.prompt_tokens == 2


# --- leaving early -------------------------------------------------------------------------


def test_cancelling_frees_the_row(served: Served) -> None:
    before = served.stats()
    stream = served.stream()
    for _ in range(3):
        assert next(stream).HasField("delta")
    assert served.stats().decoding == 1
    stream.cancel()
    served.wait_idle()
    after = served.stats()
    assert after.cancelled == before.cancelled + 1
    assert (after.finished, after.failed) == (before.finished, before.failed)


def test_a_deadline_frees_the_row(served: Served) -> None:
    request = pb.GenerateRequest(prompt=ids([4]), max_tokens=LONG_REPLY, ignore_eos=True)
    before = served.stats().cancelled
    error = refusal(lambda: list(served.stub.Generate(request, timeout=0.3)))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: served.stats().cancelled == before + 1, "the row to be free")
    served.wait_idle()


def test_a_client_that_goes_away_frees_the_row(served: Served) -> None:
    before = served.stats().cancelled
    with grpc.insecure_channel(served.engine.listen.target) as channel:
        request = pb.GenerateRequest(prompt=ids([4]), max_tokens=LONG_REPLY, ignore_eos=True)
        next(engine_pb2_grpc.EngineStub(channel).Generate(request))
    until(lambda: served.stats().cancelled == before + 1, "the row to be free")
    served.wait_idle()


def test_cancelled_replies_are_hits_for_those_who_ask_again(served: Served) -> None:
    tokens = [204, *((3 * n) % 256 for n in range(199))]
    stream = served.stream(prompt=ids(tokens), max_tokens=1000)
    next(stream)
    stream.cancel()
    until(lambda: stored(served, tokens), "the rows to be written")


def stored(served: Served, tokens: list[int]) -> bool:
    usage = served.generate(prompt=ids([*tokens, 1]), max_tokens=1)[2].usage
    return usage.cached_tokens >= len(tokens)


def test_many_who_give_up_on_stats_harm_nobody(served: Served) -> None:
    stream = served.stream(prompt=ids([1] * 500), max_tokens=1000)
    for _ in range(100):
        # Most end before the worker looks into its inbox.
        served.stub.Stats.future(pb.StatsRequest(), timeout=0.002).cancel()
        error = served.stub.Stats.future(pb.StatsRequest(), timeout=0.002).exception()
        if error is not None:
            assert isinstance(error, grpc.Call)
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert next(stream).HasField("delta")
    stream.cancel()
    served.wait_idle()


# --- warm, model, stats --------------------------------------------------------------------


def test_warm_stores_a_prompt_for_an_exact_hit(served: Served) -> None:
    tokens = [201, *((5 * n + 1) % 256 for n in range(299))]
    cold = served.stub.Warm(pb.WarmRequest(prompt=ids(tokens)))
    assert (cold.stored_tokens, cold.usage.cached_tokens) == (300, 0)
    assert (cold.usage.prompt_tokens, cold.usage.completion_tokens) == (300, 0)
    assert cold.usage.match == pb.CACHE_MATCH_MISS
    assert cold.timing.prefill_ms > 0
    hit = served.generate(prompt=ids(tokens), max_tokens=4)[2].usage
    assert (hit.cached_tokens, hit.match) == (299, pb.CACHE_MATCH_EXACT)
    again = served.stub.Warm(pb.WarmRequest(prompt=ids(tokens)))
    assert (again.stored_tokens, again.usage.cached_tokens) == (300, 299)
    assert again.usage.match == pb.CACHE_MATCH_EXACT


def test_kinds_of_match_are_reported(served: Served) -> None:
    tokens = [202, *((7 * n + 2) % 256 for n in range(99))]
    served.stub.Warm(pb.WarmRequest(prompt=ids(tokens)))

    def match(asked: list[int]) -> tuple[int, int]:
        usage = served.generate(prompt=ids(asked), max_tokens=1)[2].usage
        return usage.match, usage.cached_tokens

    assert match([*tokens[:50], 255, 255]) == (pb.CACHE_MATCH_LCP, 50)
    assert match(tokens[:80]) == (pb.CACHE_MATCH_SUPERSEQUENCE, 79)
    assert match([*tokens, 1, 1]) == (pb.CACHE_MATCH_PREFIX, 100)
    assert match([255, 254, 253, 1]) == (pb.CACHE_MATCH_MISS, 0)


def test_the_model_describes_itself(served: Served) -> None:
    model = served.stub.GetModel(pb.GetModelRequest())
    assert model.name == str(served.model)
    assert model.architecture == "llama"
    assert model.context_tokens == CONTEXT_TOKENS
    assert model.vocabulary_tokens == VOCABULARY_TOKENS
    assert list(model.eos_token_ids) == [EOS]
    assert (model.dtype, model.batch_mode) == ("float32", "batched")
    assert model.backend in ("cpu", "metal", "cuda")
    assert (model.cache_codec, model.not_cached_reason) == ("none", "")
    assert len(model.namespace) == 32
    served.stub.Warm(pb.WarmRequest(prompt=ids([205, 1, 2])))
    (namespace,) = served.store.stats().namespaces
    assert namespace.namespace == model.namespace


def test_stats_count(served: Served) -> None:
    served.wait_idle()
    before = served.stats()
    tokens = [203, *((11 * n + 3) % 256 for n in range(149))]
    served.stub.Warm(pb.WarmRequest(prompt=ids(tokens)))
    served.generate(prompt=ids([*tokens, 1, 2]), max_tokens=7, ignore_eos=True)
    after = served.stats()
    assert after.pid == served.engine.process.pid
    assert after.uptime_seconds > before.uptime_seconds > 0
    assert after.cachestore_connected
    assert after.mlx_peak_bytes >= after.mlx_active_bytes > 0

    def counted(name: str) -> int:
        return int(getattr(after, name) - getattr(before, name))

    assert (counted("finished"), counted("failed"), counted("cancelled")) == (2, 0, 0)
    assert counted("prompt_tokens") == 150 + 152
    assert counted("cached_tokens") == 150
    assert counted("prefilled_tokens") == 150 + 2
    assert counted("completion_tokens") == 7
    assert counted("writes_committed") >= 1
    assert counted("writes_dropped") == 0


def test_health_says_serving(served: Served) -> None:
    assert served.engine.serving()
