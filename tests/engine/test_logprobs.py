"""Log-probabilities: against mlx-lm's own, alone, among others, and behind cached rows."""

import time
from typing import Any

import grpc
import mlx.core as mx
import numpy as np
import pytest

from engine.batch import Token
from engine.logprobs import LogprobReader
from engine.request import Delta, Sampling, TokenLogprobs
from engine.v1 import engine_pb2 as pb
from tests.support.cores import LONG, SHORT, Driven, alone
from tests.support.engines import Logprobs, ids
from tests.support.served import Served, refusal

TOLERANCE = 2e-4


def row(uid: int, dtype: mx.Dtype = mx.float32, width: int = 500) -> Token:
    logits = 4 * mx.random.normal((width,), key=mx.random.key(uid)).astype(dtype)
    logprobs = logits - mx.logsumexp(logits)
    mx.eval(logprobs)
    return Token(uid, 7 * uid, logprobs)


# --- the reader ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 5, 20, 500])
def test_the_best_are_those_of_a_full_sort(dtype: mx.Dtype, count: int) -> None:
    tokens = [row(uid, dtype) for uid in (1, 2, 3)]
    read = LogprobReader().read(tokens, {1: count, 3: 2})
    assert read.keys() == {1, 3}
    for token, expected in ((tokens[0], count), (tokens[2], 2)):
        logprobs = np.array(token.logprobs.astype(mx.float32))
        found = read[token.uid]
        assert found.logprob == logprobs[token.token]
        assert [other.logprob for other in found.top] == sorted(logprobs)[::-1][:expected]
        assert [logprobs[other.token] for other in found.top] == [o.logprob for o in found.top]
        assert len({other.token for other in found.top}) == expected


def test_equal_ones_come_in_the_order_of_their_ids() -> None:
    token = Token(1, 0, mx.array([-3.0, -1.0, -2.0, -1.0, -1.0]))
    read = LogprobReader().read([token], {1: 4})
    assert [other.token for other in read[1].top] == [1, 3, 4, 2]


def test_nothing_is_read_when_nobody_asks() -> None:
    assert LogprobReader().read([row(1)], {}) == {}


def test_reading_does_not_wait_for_the_step_under_way() -> None:
    reader = LogprobReader()
    token = row(1, mx.bfloat16)
    reader.read([token], {1: 20})
    under_way = mx.ones((1500, 1500))
    for _ in range(12):
        under_way = under_way @ under_way * 1e-3
    began = time.perf_counter()
    mx.async_eval(under_way)
    reader.read([token], {1: 20})
    read = time.perf_counter()
    mx.eval(under_way)
    assert read - began < (time.perf_counter() - began) / 2


# --- the core ------------------------------------------------------------------------------


def told(driven: Driven, request_id: int) -> list[TokenLogprobs]:
    deltas = [event for event in driven.events[request_id] if isinstance(event, Delta)]
    for delta in deltas:
        assert len(delta.logprobs) in (0, len(delta.token_ids))
    return [logprobs for delta in deltas for logprobs in delta.logprobs]


def assert_told(found: list[TokenLogprobs], tokens: list[int], logprobs: list[Logprobs]) -> None:
    assert len(found) == len(tokens)
    for at, token, expected in zip(found, tokens, logprobs, strict=False):
        assert at.logprob == pytest.approx(expected[token], abs=TOLERANCE)
        best = [other.logprob for other in at.top]
        assert best == pytest.approx(sorted(expected)[::-1][: len(best)], abs=TOLERANCE)
        for other in at.top:
            assert other.logprob == pytest.approx(expected[other.token], abs=TOLERANCE)


def test_they_are_those_of_mlx_lm_whoever_else_is_in_the_batch(driven: Driven, llama: Any) -> None:
    driven.start(1, LONG, max_tokens=8, logprobs=5)
    driven.start(2, SHORT, max_tokens=12)
    driven.core.turn()
    driven.start(3, SHORT, max_tokens=8, logprobs=0)
    driven.turn_until_idle()
    for request_id, tokens, count in ((1, LONG, 5), (3, SHORT, 0)):
        expected = alone(llama, tokens, 8)
        found = told(driven, request_id)
        assert_told(found, expected.tokens, expected.logprobs)
        assert {len(at.top) for at in found} == {count}
    assert told(driven, 2) == []


def test_temperature_and_filters_do_not_change_them(driven: Driven, llama: Any) -> None:
    sampling = Sampling(2.0, top_p=0.5, top_k=3, min_p=0.1, seed=1)
    driven.start(1, LONG, max_tokens=1, logprobs=20, sampling=sampling)
    driven.turn_until_idle()
    assert_told(told(driven, 1), driven.deltas(1), alone(llama, LONG, 1).logprobs)


@pytest.mark.parametrize("rows", [1, 16, 40, len(LONG) - 1])
def test_a_hit_tells_what_a_miss_tells(driven: Driven, llama: Any, rows: int) -> None:
    driven.start_behind(1, LONG, rows, max_tokens=6, logprobs=20)
    driven.turn_until_idle()
    assert driven.done(1).usage.cached_tokens == rows
    expected = alone(llama, LONG, 6)
    assert_told(told(driven, 1), expected.tokens, expected.logprobs)


def test_held_back_text_holds_nothing_else_back(driven: Driven, llama: Any) -> None:
    expected = alone(llama, SHORT, 6)
    texts = [chr(256 + token) for token in expected.tokens]
    never = texts[0] + texts[1] + texts[2] + "?"
    driven.start(1, SHORT, max_tokens=6, stop=(never,), logprobs=2)
    driven.turn_until_idle()
    deltas = [event for event in driven.events[1] if isinstance(event, Delta)]
    assert [len(delta.logprobs) for delta in deltas] == [1] * 6
    assert deltas[0].text == ""
    assert "".join(delta.text for delta in deltas) == "".join(texts)
    assert_told(told(driven, 1), expected.tokens, expected.logprobs)


def test_a_stop_token_has_none_and_a_stop_string_has(driven: Driven, llama: Any) -> None:
    expected = alone(llama, SHORT, 4)
    stop = expected.tokens[3]
    before = expected.tokens.index(stop)
    driven.start(1, SHORT, max_tokens=8, stop_token_ids=frozenset([stop]), logprobs=1)
    driven.start(2, SHORT, max_tokens=8, stop=(chr(256 + stop),), logprobs=1)
    driven.turn_until_idle()
    for request_id, sent in ((1, before), (2, before + 1)):
        assert driven.deltas(request_id) == expected.tokens[:sent]
        assert_told(told(driven, request_id), expected.tokens[:sent], expected.logprobs)


# --- the service ---------------------------------------------------------------------------


def test_a_client_gets_them_with_each_token(served: Served) -> None:
    request = pb.GenerateRequest(prompt=ids(LONG), max_tokens=6, ignore_eos=True, logprobs=3)

    def ask() -> tuple[list[int], list[pb.TokenLogprobs], int]:
        tokens: list[int] = []
        logprobs: list[pb.TokenLogprobs] = []
        for message in served.stub.Generate(request):
            if message.HasField("done"):
                return tokens, logprobs, message.done.usage.cached_tokens
            assert len(message.delta.logprobs) == len(message.delta.token_ids)
            tokens += message.delta.token_ids
            logprobs += message.delta.logprobs
        raise AssertionError("no Done")

    cold, hit = ask(), ask()
    assert (cold[2], hit[2]) == (0, len(LONG) - 1)
    assert cold[0] == hit[0]
    for miss, found, token in zip(cold[1], hit[1], cold[0], strict=True):
        assert miss.top[0].token_id == token
        assert miss.top[0].logprob == miss.logprob
        assert found.logprob == pytest.approx(miss.logprob, abs=TOLERANCE)
        assert [t.logprob for t in found.top] == pytest.approx(
            [t.logprob for t in miss.top], abs=TOLERANCE
        )


def test_a_client_that_does_not_ask_gets_none(served: Served) -> None:
    request = pb.GenerateRequest(prompt=ids(SHORT), max_tokens=3)
    deltas = [m.delta for m in served.stub.Generate(request) if m.HasField("delta")]
    assert deltas
    assert not any(delta.logprobs for delta in deltas)


def test_more_than_twenty_are_refused(served: Served) -> None:
    error = refusal(lambda: served.generate(prompt=ids(SHORT), logprobs=21))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "logprobs: 21 alternatives, at most 20"
