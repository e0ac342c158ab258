"""One prefill for a crowd: requests on one cold prefix wait for whoever computes it first."""

import contextlib
import itertools
import random
import string
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.support import stalling
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import EngineDaemon, chat, start_engine
from tests.support.models import gemma3_config, llama_config, qwen3_next_config, save_tiny_model
from tests.support.waiting import until

# Of rows, of windows beside rows, and of recurrent state beside rows.
CONFIGS = {"llama": llama_config(), "gemma3": gemma3_config(), "qwen3_next": qwen3_next_config()}
# In tokens, one for each letter and a few for the template.
PREFIX, TAIL, CROWD, RECORD = 1000, 20, 8, 256
SYSTEM_LETTERS, QUESTION_LETTERS = PREFIX - 16, TAIL - 13
# At most, of a whole crowd, whatever happens to the first of it.
COMPUTED_MAX = PREFIX + CROWD * TAIL + RECORD
# Slow enough that a crowd arrives while the first one computes.
FLAGS = ("--cache-codec", "none", "--prefill-step", "16")
# Prompt tokens that the leader has computed when it is cancelled.
STEPS = (0, *random.Random(0).sample(range(1, PREFIX), 3), PREFIX)


def request(prompt: pb.Prompt) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt, max_tokens=6, ignore_eos=True)


def reply(engine: EngineDaemon, prompt: pb.Prompt) -> list[int]:
    with connect(engine.listen) as stub:
        replies = stub.Generate(request(prompt), timeout=60)
        return [token for each in replies for token in each.delta.token_ids]


def computed(*engines: EngineDaemon) -> int:
    """Prompt tokens that they have run through the model, since start."""
    total = 0
    for engine in engines:
        with connect(engine.listen) as stub:
            total += stub.Stats(pb.StatsRequest()).prefilled_tokens
    return total


@dataclass
class Stage:
    directory: Path
    model: Path
    store: Cachestore
    engines: tuple[EngineDaemon, EngineDaemon]
    cold: EngineDaemon
    seeds: Iterator[int]

    def crowd(self) -> tuple[list[pb.Prompt], list[list[int]]]:
        """Chats on a system prompt that nobody has asked for, and the replies of a cold run."""
        system, *questions = self.texts(SYSTEM_LETTERS, QUESTION_LETTERS)
        prompts = [chat(("system", system), ("user", question)) for question in questions]
        return prompts, self.expected(prompts)

    def raw_crowd(self) -> tuple[list[pb.Prompt], list[list[int]]]:
        """The same of prompts that are text: nobody can tell where they will part."""
        prefix, *tails = self.texts(PREFIX, TAIL - 1)
        # They part behind the prefix, and not a letter later.
        prompts = [pb.Prompt(text=prefix + str(n) + tail) for n, tail in enumerate(tails)]
        return prompts, self.expected(prompts)

    def texts(self, prefix_letters: int, tail_letters: int) -> list[str]:
        draw = random.Random(next(self.seeds))
        letters = (prefix_letters, *[tail_letters] * CROWD)
        return ["".join(draw.choices(string.ascii_letters, k=k)) for k in letters]

    def expected(self, prompts: list[pb.Prompt]) -> list[list[int]]:
        with ThreadPoolExecutor(CROWD) as pool:
            return list(pool.map(lambda prompt: reply(self.cold, prompt), prompts))

    def check_nothing_announced(self) -> None:
        """Once all replies have come. A lease ends, and what it announced, when the rows of its
        reply are stored, which is after the reply."""
        assert self.store.stats().waiting == 0
        until(lambda: self.store.stats().announced == 0, "the announcements to end")


@contextlib.contextmanager
def using(
    directory: Path,
    model: Path,
    store: Cachestore,
    name: str,
    program: Sequence[str] | None = None,
) -> Iterator[EngineDaemon]:
    """An engine that uses the store already."""
    flags = ("--cachestore", f"unix:{store.socket}", *FLAGS)
    with start_engine(directory, model, *flags, name=name, program=program) as engine:
        with connect(engine.listen) as stub:
            until(lambda: stub.GetModel(pb.GetModelRequest()).namespace, "the weights' digest")
        yield engine


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with short_directory() as directory, start_cachestore(directory) as store:
        model = save_tiny_model(directory / "model", CONFIGS[request.param])
        with (
            using(directory, model, store, "one") as one,
            using(directory, model, store, "two") as two,
            start_engine(directory, model, "--cachestore", "off", name="cold") as cold,
        ):
            yield Stage(directory, model, store, (one, two), cold, itertools.count())


@contextlib.contextmanager
def led(
    stage: Stage, leader: EngineDaemon, prompts: list[pb.Prompt], engines: tuple[EngineDaemon, ...]
) -> Iterator[tuple[Any, list[Future[list[int]]]]]:
    """The first of a crowd computes, and the others wait for it, each in one of the engines."""
    with connect(leader.listen) as stub, ThreadPoolExecutor(CROWD) as pool:
        first = stub.Generate(request(prompts[0]))
        until(lambda: stage.store.stats().announced == 1, "the leader to announce")
        others = [
            pool.submit(reply, engine, prompt)
            for prompt, engine in zip(prompts[1:], itertools.cycle(engines), strict=False)
        ]
        until(lambda: stage.store.stats().waiting == len(others), "the others to wait")
        yield first, others
    stage.check_nothing_announced()


@pytest.mark.parametrize("stage", ["llama"], indirect=True)
@pytest.mark.parametrize("count", [1, 2])
def test_a_crowd_prefills_its_prefix_once(stage: Stage, count: int) -> None:
    assert check_at_once(stage, count, *stage.crowd()) <= COMPUTED_MAX


def check_at_once(
    stage: Stage, count: int, prompts: list[pb.Prompt], expected: list[list[int]]
) -> int:
    """All of a crowd come together, to so many engines; returns what these compute."""
    engines = stage.engines[:count]
    before = computed(*engines)
    with ThreadPoolExecutor(CROWD) as pool:
        replies = list(pool.map(reply, itertools.cycle(engines), prompts))
    stage.check_nothing_announced()
    assert replies == expected
    return computed(*engines) - before


def check_followers(stage: Stage, step: int, count: int) -> None:
    """They go on when the leader is cancelled, and all together compute what one would."""
    engines = stage.engines[:count]
    prompts, expected = stage.crowd()
    before = computed(*engines)
    with led(stage, engines[0], prompts, engines) as (leader, followers):
        until(lambda: computed(*engines) - before >= step, f"{step} tokens")
        leader.cancel()
        replies = [follower.result(timeout=60) for follower in followers]
    assert replies == expected[1:]
    assert computed(*engines) - before <= COMPUTED_MAX


@pytest.mark.parametrize("stage", ["llama"], indirect=True)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_a_follower_goes_on_when_the_leader_is_cancelled(
    stage: Stage, step: int, count: int
) -> None:
    check_followers(stage, step, count)


@pytest.mark.parametrize("stage", ["llama"], indirect=True)
def test_a_follower_goes_on_when_the_leaders_engine_is_killed(stage: Stage) -> None:
    _, two = stage.engines
    prompts, expected = stage.crowd()
    before = computed(two)
    with (
        using(stage.directory, stage.model, stage.store, "three") as three,
        led(stage, three, prompts[:3], (two,)) as (leader, followers),
    ):
        three.kill()
        with pytest.raises(grpc.RpcError):
            list(leader)
        replies = [follower.result(timeout=60) for follower in followers]
    assert replies == expected[1:3]
    assert computed(two) - before <= PREFIX + 2 * TAIL + RECORD


@pytest.mark.parametrize("stage", ["llama"], indirect=True)
def test_a_follower_goes_on_when_a_step_of_the_leader_fails(stage: Stage) -> None:
    _, two = stage.engines
    gate = stage.directory / "gate"
    prompts, expected = stage.crowd()
    with using(
        stage.directory, stage.model, stage.store, "four", stalling.program(gate, "fails")
    ) as four:
        before = computed(two, four)
        with led(stage, four, prompts, (four, two)) as (leader, followers):
            until(lambda: computed(two, four) - before >= STEPS[1], f"{STEPS[1]} tokens")
            gate.touch()
            with pytest.raises(grpc.RpcError) as failed:
                list(leader)
            replies = [follower.result(timeout=60) for follower in followers]
        assert failed.value.code() == grpc.StatusCode.INTERNAL
        # What a step computed that failed is lost; a follower leads from the beginning.
        assert computed(two, four) - before <= PREFIX + COMPUTED_MAX
    assert replies == expected[1:]


@pytest.mark.parametrize("stage", ["gemma3", "qwen3_next"], indirect=True)
@pytest.mark.parametrize(("step", "count"), [(STEPS[1], 1), (STEPS[2], 2)])
def test_a_follower_goes_on_where_a_model_needs_checkpoints(
    stage: Stage, step: int, count: int
) -> None:
    check_followers(stage, step, count)


@pytest.mark.parametrize("stage", ["gemma3", "qwen3_next"], indirect=True)
@pytest.mark.parametrize("count", [1, 2])
def test_two_of_a_crowd_prefill_what_is_raw_where_a_model_needs_checkpoints(
    stage: Stage, count: int
) -> None:
    """The second one is told where it parts from the first, and the others wait for that."""
    assert check_at_once(stage, count, *stage.raw_crowd()) <= PREFIX + COMPUTED_MAX


@pytest.mark.parametrize("stage", ["gemma3", "qwen3_next"], indirect=True)
def test_the_third_who_parts_at_the_same_place_goes_on_from_there(stage: Stage) -> None:
    engine, _ = stage.engines
    prompts, expected = stage.raw_crowd()
    spent = []
    for prompt, tokens in zip(prompts[:4], expected, strict=False):
        before = computed(engine)
        assert reply(engine, prompt) == tokens
        stage.check_nothing_announced()
        spent.append(computed(engine) - before)
    assert min(spent[:2]) >= PREFIX
    assert max(spent[2:]) <= TAIL + RECORD // 8
