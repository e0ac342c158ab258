import math
from typing import Any

import pytest

from engine import config
from engine.config import EngineConfig, PrefillStep, parse_listen
from engine.flags import ConfigError
from engine.request import (
    InvalidRequest,
    ModelLimits,
    Penalties,
    Penalty,
    Request,
    Sampling,
    check_prompt,
    request_from,
    sampling_from,
)
from engine.v1 import engine_pb2 as pb

CONTEXT, VOCABULARY, EOS = 100, 50, frozenset({48, 49})
LIMITS = ModelLimits(CONTEXT, VOCABULARY, EOS)
PROMPT = [1, 2, 3]


def made(tokens: list[int] | None = None, **fields: Any) -> Request:
    return request_from(pb.GenerateRequest(**fields), tokens or PROMPT, LIMITS)


def sampled(**fields: Any) -> Sampling:
    return sampling_from(pb.Sampling(**fields), LIMITS)


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": CONTEXT - 2}, "max_tokens", f"leaves {CONTEXT - 3}"),
        ({"max_tokens": 2**32 - 1}, "max_tokens", f"context of {CONTEXT}"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": ["fine", ""]}, "stop", "has 0"),
        ({"stop": ["x" * 257]}, "stop", "has 257"),
        ({"stop": ["é" * 129]}, "stop", "has 258"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids", str(VOCABULARY)),
        ({"stop_token_ids": [2**32 - 1]}, "stop_token_ids", str(2**32 - 1)),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"logprobs": 2**32 - 1}, "logprobs", "at most 20"),
        ({"sampling": pb.Sampling(temperature=-1.0)}, "sampling.temperature", "-1"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(fields: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        made(**fields)
    assert str(raised.value).startswith(field + ":")
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 100.1, math.nan, math.inf, -math.inf)),
        *(("top_p", value) for value in (0.0, -0.5, 1.0001, math.nan, math.inf, -math.inf)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan, math.inf, -math.inf)),
        ("top_k", VOCABULARY + 1),
        ("top_k", 2**32 - 1),
        *(("repetition_penalty", v) for v in (0.001, 101.0, -1.0, math.nan, math.inf, -math.inf)),
        *(("presence_penalty", v) for v in (100.1, -100.1, math.nan, math.inf, -math.inf)),
        *(("frequency_penalty", v) for v in (100.1, -100.1, math.nan, math.inf, -math.inf)),
        *(("logit_bias", {3: v}) for v in (100.1, -100.1, math.nan, math.inf, -math.inf)),
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {2**32 - 1: 1.0}),
    ],
)
def test_a_sampling_field_that_cannot_be_used_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{field}: "):
        sampled(**{field: value})


def test_without_sampling_a_request_is_greedy_and_of_the_default_length() -> None:
    assert made() == Request(
        tokens=(1, 2, 3), max_tokens=CONTEXT - 3, sampling=Sampling(), stop_token_ids=EOS
    )
    roomy = ModelLimits(100_000, VOCABULARY, EOS)
    assert request_from(pb.GenerateRequest(), PROMPT, roomy).max_tokens == 512


def test_the_limits_themselves_are_fine() -> None:
    request = made(
        max_tokens=CONTEXT - 3,
        stop=["x" * 256] * 16,
        stop_token_ids=[VOCABULARY - 1] * 64,
    )
    assert request.max_tokens == CONTEXT - 3
    assert request.stop == ("x" * 256,) * 16
    assert request.stop_token_ids == EOS | {VOCABULARY - 1}
    assert made(max_tokens=1).max_tokens == 1
    assert sampled(temperature=100.0).temperature == 100.0
    assert sampled(temperature=-0.0).temperature == 0.0
    assert sampled(top_p=1.0).top_p == 1.0
    assert sampled(top_p=1e-30).top_p == pytest.approx(1e-30)
    assert sampled(min_p=1.0).min_p == 1.0
    assert sampled(top_k=VOCABULARY - 1).top_k == VOCABULARY - 1


def test_log_probabilities_are_none_unless_asked_for() -> None:
    assert made().logprobs is None
    assert made(logprobs=0).logprobs == 0
    assert made(logprobs=20).logprobs == 20
    few = ModelLimits(CONTEXT, 7, EOS)
    assert request_from(pb.GenerateRequest(logprobs=20), PROMPT, few).logprobs == 7


def test_a_bias_is_for_at_most_1024_tokens() -> None:
    roomy = ModelLimits(CONTEXT, 5000, EOS)
    biases = dict.fromkeys(range(1024), -100.0)
    sampling = sampling_from(pb.Sampling(logit_bias=biases), roomy)
    assert sampling.penalties == Penalties(logit_bias=biases)
    with pytest.raises(InvalidRequest, match=r"^sampling\.logit_bias: 1025 tokens, at most 1024"):
        sampling_from(pb.Sampling(logit_bias={**biases, 1024: 1.0}), roomy)


def test_penalties_that_change_nothing_are_none() -> None:
    assert sampled().penalties == Penalties()
    off = sampled(repetition_penalty=1.0, repetition_context_size=5, frequency_context_size=5)
    assert off.penalties == Penalties()


def test_penalties_look_at_twenty_tokens_unless_told() -> None:
    made = sampled(
        repetition_penalty=0.5,
        presence_penalty=-100.0,
        presence_context_size=1,
        frequency_penalty=100.0,
        frequency_context_size=2**32 - 1,
    )
    assert made.penalties == Penalties(
        Penalty(0.5, 20), Penalty(-100.0, 1), Penalty(100.0, CONTEXT)
    )


def test_all_tokens_are_no_filter() -> None:
    assert sampled(top_k=VOCABULARY).top_k == 0


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_seed_of_zero_is_a_seed(seed: int) -> None:
    assert sampled(seed=seed).seed == seed
    assert sampled().seed is None


def test_the_models_own_end_can_be_ignored_but_not_the_asked_one() -> None:
    assert made(ignore_eos=True).stop_token_ids == frozenset()
    assert made(ignore_eos=True, stop_token_ids=[48, 7]).stop_token_ids == {48, 7}


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
def test_a_prompt_must_leave_room_for_one_token(length: int) -> None:
    check_prompt([1] * (CONTEXT - 1), LIMITS)
    assert made([1] * (CONTEXT - 1)).max_tokens == 1
    with pytest.raises(InvalidRequest, match=rf"^prompt: {length} tokens.* {CONTEXT} "):
        check_prompt([1] * length, LIMITS)
    with pytest.raises(InvalidRequest, match=r"^prompt: "):
        made([1] * length)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("127.0.0.9:0", "127.0.0.9:0"),
        ("localhost:65535", "localhost:65535"),
        ("[::1]:80", "[::1]:80"),
        ("[0:0:0:0:0:0:0:1]:80", "[0:0:0:0:0:0:0:1]:80"),
        ("unix:/tmp/engine.sock", "unix:/tmp/engine.sock"),
        ("unix:/tmp/a b#?.sock", "unix:/tmp/a%20b%23%3F.sock"),
    ],
)
def test_an_address_is_what_grpc_binds(text: str, target: str) -> None:
    listen = parse_listen(text)
    assert listen.target == target
    assert str(listen) == text
    assert parse_listen(str(listen)) == listen


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nowhere",
        "50051",
        ":50051",
        "127.0.0.1:",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "127.0.0.1:+1",
        "127.0.0.1: 80",
        "127.0.0.1:http",
        "127.0.0.1:" + "1" * 5000,
        "127.0.0.1:²",
        "127.0.0.1:٣",
        # gRPC would take the port for a part of the address, or the bracket for a part of a name.
        "::1:80",
        "[::1:80",
        "::1]:80",
        "127.0.0.1]:80",
        "[localhost]:80",
        "[127.0.0.1]:80",
        "[]:80",
        # Not loopback.
        "0.0.0.0:80",
        "[::]:80",
        "192.168.1.1:80",
        "[fe80::1]:80",
        "example.com:80",
        "localhost.example.com:80",
        "127.1:80",
        # Not paths.
        "unix:",
        "unix:" + "/tmp/" + "d" * 99,
        "unix:/tmp/a\0b",
    ],
)
def test_an_address_that_cannot_be_used_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--engine: "):
        parse_listen(text, "--engine")


def test_a_path_of_103_bytes_is_the_longest() -> None:
    assert parse_listen("unix:/" + "d" * 102).unix_path is not None
    with pytest.raises(ConfigError, match=r"--listen: .*103"):
        parse_listen("unix:/" + "d" * 103)


def test_a_prefill_step_of_the_users_own_holds_while_rows_decode_too() -> None:
    listen = parse_listen("127.0.0.1:0")
    for backend, measured in config.PREFILL_STEPS.items():
        assert EngineConfig("m", listen).steps(backend) == measured
        small = EngineConfig("m", listen, prefill_step=3).steps(backend)
        assert small == PrefillStep(idle=3, busy=3)
        large = EngineConfig("m", listen, prefill_step=100_000).steps(backend)
        assert large == PrefillStep(idle=100_000, busy=measured.busy)
