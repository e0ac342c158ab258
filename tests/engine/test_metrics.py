"""Metrics of an engine are what its Stats say, under names that Prometheus likes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from engine.metrics import EngineMetrics, Served
from engine.v1 import engine_pb2 as pb
from engine.worker import Worker
from tests.support import served as serving
from tests.support.engines import ids
from tests.support.scrapes import NO_PROMTOOL, Scrape, complaints, scrape, url_in
from tests.support.served import refusal
from tests.support.waiting import until

ENGINE = "mlx_cachestore_engine_"
PROMPT = list(range(1, 60))
OUTCOMES = {field.name for field in pb.Outcomes.DESCRIPTOR.fields}
MATCHES = {field.name for field in pb.MatchCounts.DESCRIPTOR.fields}


class Watched:
    """An engine that has been asked in every way that is counted."""

    def __init__(self, served: serving.Served) -> None:
        self.served = served
        self.url = url_in(served.model.parent / "engine.log")
        for prompt in (PROMPT, PROMPT, PROMPT[:30], [*PROMPT, 7, 7], [200, 201, 202]):
            served.generate(prompt=ids(prompt), max_tokens=6, ignore_eos=True)
        served.stub.Warm(pb.WarmRequest(prompt=ids([9] * 20)))
        stream = served.stream()
        next(iter(stream))
        stream.cancel()
        for model, tokens in (("nobody's", 1), ("", 1 << 31)):
            code = refusal(
                partial(served.generate, model=model, prompt=ids([1]), max_tokens=tokens)
            ).code()
            assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
        served.wait_idle()
        # The store has what the engine wrote last, and the last request is counted.
        until(self.settled, "the last request to be counted")

    def settled(self) -> bool:
        outcomes = self.served.stats().outcomes
        return bool(sum(getattr(outcomes, name) for name in OUTCOMES) == 9)

    def scrape(self) -> Scrape:
        return scrape(self.url)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with serving.serve("--metrics", "127.0.0.1:0") as served:
        yield Watched(served)


def fields(message: Any) -> dict[str, float]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def test_requests_and_tokens_are_those_of_stats(watched: Watched) -> None:
    stats, found = watched.served.stats(), watched.scrape()
    assert found[ENGINE + "up"] == 1
    assert found.all(ENGINE + "requests_total") == fields(stats.outcomes)
    assert found.all(ENGINE + "requests_total") == dict.fromkeys(OUTCOMES, 0.0) | {
        **{"length": 5, "warmed": 1, "cancelled": 1, "invalid": 2}
    }
    assert (stats.finished, stats.cancelled, stats.failed) == (6, 1, 0)
    assert found.all(ENGINE + "matches_total") == fields(stats.matches)
    assert found.all(ENGINE + "cached_tokens_total") == fields(stats.matched_tokens)
    assert sum(fields(stats.matched_tokens).values()) == stats.cached_tokens > 0
    assert sum(fields(stats.matches).values()) == 7
    assert stats.matches.exact == 1
    assert stats.matched_tokens.exact == len(PROMPT) - 1
    assert found[ENGINE + "prompt_tokens_total"] == stats.prompt_tokens
    assert found[ENGINE + "prefilled_tokens_total"] == stats.prefilled_tokens
    assert found[ENGINE + "generated_tokens_total"] == stats.completion_tokens
    assert found[ENGINE + "waiting_requests"] == stats.queued == 0
    assert found.all(ENGINE + "running_requests") == {"prefill": 0, "decode": 0}


def test_times_are_counted_once_for_each_request_and_token(watched: Watched) -> None:
    stats, found = watched.served.stats(), watched.scrape()
    for name, counted in (
        ("queue_seconds", stats.queue_seconds),
        ("time_to_first_token_seconds", stats.first_token_seconds),
        ("time_per_output_token_seconds", stats.next_token_seconds),
        ("batch_requests", stats.batch_requests),
    ):
        assert found[f"{ENGINE}{name}_count"] == sum(counted.counts) > 0
        assert found[f"{ENGINE}{name}_sum"] == counted.sum
        below = [*found.all(f"{ENGINE}{name}_bucket").values()]
        assert below == sorted(below)
        assert below[-1] == found[f"{ENGINE}{name}_count"]
    assert sum(stats.queue_seconds.counts) == 7
    # No token of a Warm is sent to anybody.
    assert sum(stats.first_token_seconds.counts) == 6
    tokens = stats.completion_tokens
    assert sum(stats.next_token_seconds.counts) == tokens - 6
    assert 0 < stats.first_token_seconds.sum < 60


def test_bytes_and_memory_are_those_of_stats(watched: Watched) -> None:
    stats, found = watched.served.stats(), watched.scrape()
    assert found[ENGINE + "store_connected"] == 1
    for name, done in (("attach", stats.attached), ("store", stats.stored)):
        past = {"attach": "attached", "store": "stored"}[name]
        assert found[f"{ENGINE}{past}_bytes_total"] == done.bytes > 0
        assert found[f"{ENGINE}{name}_seconds_total"] == done.seconds > 0
    store = watched.served.store.stats()
    # Everything in the store is this engine's, and nobody wrote the same rows.
    assert stats.stored.bytes == store.bytes_used - store.bytes_padding
    assert found.all(ENGINE + "writes_total") == {
        "committed": stats.writes_committed,
        "dropped": stats.writes_dropped,
    }
    assert found[ENGINE + "mlx_active_bytes"] == stats.mlx_active_bytes > 0
    assert found[ENGINE + "mlx_peak_bytes"] == stats.mlx_peak_bytes
    assert found[ENGINE + "mlx_cache_bytes"] == stats.mlx_cache_bytes
    assert found["process_resident_memory_bytes"] > stats.mlx_active_bytes
    # Whoever is on this machine can ask: the model's folder is named, not where it is.
    assert found.labels[ENGINE + "build_info.model"] == {watched.served.model.name}
    assert found.labels[ENGINE + "build_info.cache_codec"] == {"none"}


@pytest.mark.skipif(bool(NO_PROMTOOL), reason=NO_PROMTOOL)
def test_promtool_has_nothing_to_say(watched: Watched) -> None:
    assert complaints(watched.scrape().text) == ""


def test_clients_cannot_make_series(watched: Watched) -> None:
    before = watched.scrape()
    for model in ("a", 'b"\n', "c" * 1000, "ü"):
        error = refusal(partial(watched.served.generate, model=model, prompt=ids([1])))
        assert error.code() == grpc.StatusCode.NOT_FOUND
    for prompt in (
        pb.Prompt(),
        ids([1 << 31]),
        pb.Prompt(text="\udcff".encode("utf-8", "replace").decode()),
    ):
        with pytest.raises(grpc.RpcError):
            watched.served.generate(prompt=prompt, max_tokens=1 << 30)
    after = watched.scrape()
    assert after.series == before.series
    assert after.labels == before.labels
    assert after.labels[ENGINE + "requests.outcome"] == OUTCOMES
    assert after.labels[ENGINE + "matches.match"] == MATCHES


def test_scrapes_beside_replies_answer_each(watched: Watched) -> None:
    streams = [watched.served.stream(prompt=ids([10 + number])) for number in range(3)]
    try:
        for stream in streams:
            next(iter(stream))
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda _: watched.scrape(), range(20))]
        assert all(each[ENGINE + "up"] == 1 for each in found)
        running = [each.all(ENGINE + "running_requests")["decode"] for each in found]
        assert max(running) == 3
        tokens = [each[ENGINE + "generated_tokens_total"] for each in found]
        assert max(tokens) > min(tokens)
    finally:
        for stream in streams:
            stream.cancel()
    watched.served.wait_idle()


def test_a_port_that_is_taken_ends_the_engine_before_it_loads(
    watched: Watched, directory: Path
) -> None:
    address = watched.url.removeprefix("http://").removesuffix("/metrics")
    listen = f"unix:{directory / 'engine.sock'}"
    command = [sys.executable, "-m", "engine", "serve", "--model", str(directory / "no-such-model")]
    refused = subprocess.run(
        [*command, "--listen", listen, "--metrics", address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith(f"error: --metrics {address}: cannot be")


# --- when the worker does not answer -------------------------------------------------------


class Stuck:
    """Takes questions, and answers when the test says so."""

    turn_seconds = 70.0

    def __init__(self) -> None:
        self.asked: list[Future[int]] = []
        self.ended: Future[None] = Future()

    def snapshot(self) -> "Future[int]":
        self.asked.append(Future())
        return self.asked[-1]


def told(metrics: EngineMetrics) -> dict[str, float]:
    """Values of metrics without labels."""
    samples = [sample for family in metrics.collect() for sample in family.samples]
    return {sample.name: sample.value for sample in samples if not sample.labels}


def watch(stuck: Stuck, metrics: EngineMetrics, moves: bool = True) -> None:
    def stats(snapshot: Any) -> pb.StatsResponse:
        return pb.StatsResponse(queued=cast(int, snapshot))

    metrics.begin(Served(pb.GetModelResponse(), cast(Worker, stuck), stats, lambda: moves))


def test_before_the_model_is_loaded_only_that_is_told() -> None:
    assert told(EngineMetrics()) == {ENGINE + "up": 0}


def test_a_scrape_does_not_wait_for_a_long_step() -> None:
    stuck, metrics = Stuck(), EngineMetrics()
    watch(stuck, metrics)
    began = time.monotonic()
    found = told(metrics)
    assert time.monotonic() - began < 1.0
    assert (found[ENGINE + "up"], found[ENGINE + "turn_seconds"]) == (1, 70)
    assert ENGINE + "waiting_requests" not in found
    told(metrics)
    assert len(stuck.asked) == 1  # nobody asks twice
    stuck.asked[0].set_result(5)
    # A step later the next scrape has what was told at its end, while the worker is busy again.
    assert told(metrics)[ENGINE + "waiting_requests"] == 5
    assert len(stuck.asked) == 2
    stuck.asked[1].set_result(6)
    assert told(metrics)[ENGINE + "waiting_requests"] == 6


def test_an_engine_whose_worker_does_not_move_is_not_up() -> None:
    stuck, metrics = Stuck(), EngineMetrics()
    watch(stuck, metrics, moves=False)
    assert told(metrics)[ENGINE + "up"] == 0


def test_an_engine_whose_worker_is_over_is_not_up() -> None:
    stuck, metrics = Stuck(), EngineMetrics()
    watch(stuck, metrics)
    stuck.ended.set_result(None)
    asked: Future[int] = Future()
    asked.set_exception(RuntimeError("over"))
    stuck.snapshot = lambda: asked  # type: ignore[method-assign]
    assert told(metrics)[ENGINE + "up"] == 0
    assert told(metrics)[ENGINE + "up"] == 0
