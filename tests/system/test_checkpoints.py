"""Models that go on from checkpoints, as real daemons: chats, crowds, many turns, deaths."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import grpc
import numpy as np
import pytest

from cachestore import record
from cachestore.config import EXTENT_UNIT_BYTES
from engine.checkpoints import TOKENS_APART_MIN
from engine.kv.codec import CodecPolicy
from engine.kv.live import LiveCaches
from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.support import hasty
from tests.support.checkpoints import lossless
from tests.support.daemons import Cachestore, start_cachestore
from tests.support.engines import EngineDaemon, chat, ids, in_process, start_engine
from tests.support.faulty import Death
from tests.support.models import (
    Config,
    gemma3_config,
    lfm2_config,
    llama4_config,
    mamba2_config,
    qwen3_next_config,
    save_tiny_model,
    tiny_model,
)
from tests.support.waiting import until

CONFIGS = {
    "gemma3_text": gemma3_config(),
    "qwen3_next": qwen3_next_config(),
    "mamba2": mamba2_config(),
    "llama4": llama4_config(),
}
SYSTEM = ("system", "You are a very helpful assistant. " * 12)
REPLY_TOKENS = 6


def where(store: Cachestore) -> tuple[str, str]:
    return "--cachestore", f"unix:{store.socket}"


@contextlib.contextmanager
def serving(directory: Path, config: Config, *flags: str) -> Iterator[EngineDaemon]:
    """An engine that uses its store already."""
    model = save_tiny_model(directory / "model", config)
    with start_engine(directory, model, *flags) as engine:
        with connect(engine.listen) as stub:
            until(lambda: stub.GetModel(pb.GetModelRequest()).namespace, "the weights' digest")
        yield engine


def ask(
    engine: EngineDaemon, prompt: pb.Prompt, max_tokens: int = REPLY_TOKENS
) -> tuple[list[int], str, pb.Usage]:
    tokens, text, done = engine.generate(prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
    return tokens, text, done.usage


def ask_at_once(
    cachestore: Cachestore, engine: EngineDaemon, crowd: list[pb.Prompt]
) -> list[tuple[list[int], str, pb.Usage]]:
    """All of them, while the first one computes."""
    with ThreadPoolExecutor(len(crowd)) as pool:
        leader = pool.submit(ask, engine, crowd[0])
        until(lambda: cachestore.stats().announced == 1, "the leader to announce")
        others = [pool.submit(ask, engine, prompt) for prompt in crowd[1:]]
        return [each.result(timeout=120) for each in (leader, *others)]


def settled(store: Cachestore, engine: EngineDaemon) -> None:
    """Everything that was computed is stored."""

    def idle() -> bool:
        stats = store.stats()
        return stats.leases == stats.reservations == 0

    until(idle, "the writes")
    with connect(engine.listen) as stub:
        assert stub.Stats(pb.StatsRequest()).writes_dropped == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_the_second_turn_of_a_chat_hits(directory: Path, cachestore: Cachestore, name: str) -> None:
    said = [SYSTEM, ("user", "Hello there")]
    flags = (*where(cachestore), "--cache-codec", "none")
    replies: list[tuple[list[int], list[int]]] = []
    with serving(directory, CONFIGS[name], *flags) as engine, connect(engine.listen) as stub:
        log = (directory / "engine.log").read_text()
        assert "cached by checkpoints, every 2048 tokens and at messages" in log
        asked = 0
        for turn in range(3):
            tokens, text, usage = ask(engine, chat(*said))
            settled(cachestore, engine)
            prompt = stub.Tokenize(pb.TokenizeRequest(prompt=chat(*said))).token_ids
            replies.append(([*prompt], tokens))
            # At least up to the last message of the turn before, or what is hardly less.
            assert usage.cached_tokens > asked - 12 - TOKENS_APART_MIN
            asked = usage.prompt_tokens
            said += [("assistant", text), ("user", f"And {turn}?")]
        _, _, usage = ask(engine, chat(SYSTEM, ("user", "Something else")))
        assert usage.cached_tokens > len(SYSTEM[1])
        _, _, usage = ask(engine, chat(SYSTEM, ("user", "Hello there")))
        assert usage.cached_tokens > usage.prompt_tokens - TOKENS_APART_MIN
    with in_process(directory / "model", None) as cold:
        for asked_with, tokens in replies:
            assert cold.ask(asked_with, REPLY_TOKENS).tokens[:REPLY_TOKENS] == tokens


def test_a_crowd_on_one_system_prompt_computes_it_once(
    directory: Path, cachestore: Cachestore
) -> None:
    crowd = [chat(SYSTEM, ("user", f"Question {n}")) for n in range(8)]
    # Slow enough that all of them arrive while the first one computes.
    flags = (*where(cachestore), "--cache-codec", "none", "--prefill-step", "8")
    with serving(directory, CONFIGS["qwen3_next"], *flags) as engine:
        answers = ask_at_once(cachestore, engine, crowd)
    assert answers[0][2].cached_tokens == 0
    rests = [usage.prompt_tokens - usage.cached_tokens for _, _, usage in answers[1:]]
    assert max(rests) < 60 < len(SYSTEM[1])


def test_a_crowd_on_one_raw_prompt_computes_it_once_up_to_a_stride(
    directory: Path, cachestore: Cachestore
) -> None:
    shared = [int(t) for t in np.random.default_rng(1).integers(0, 256, 600)]
    crowd = [ids([*shared, n, 5]) for n in range(8)]
    flags = (*where(cachestore), "--prefill-step", "8", "--checkpoint-stride", "256")
    with serving(directory, CONFIGS["gemma3_text"], *flags) as engine:
        answers = ask_at_once(cachestore, engine, crowd)
    assert [usage.cached_tokens for _, _, usage in answers] == [0, *[512] * 7]


@dataclass(frozen=True)
class Bound:
    """What a conversation whose branches are idle may hold, as docs/architecture.md says."""

    config: Config
    most: int
    reply_tokens: int

    @cached_property
    def policy(self) -> CodecPolicy:
        return lossless(LiveCaches(tiny_model(self.config)))

    @property
    def states(self) -> int:
        # The first one, those of the conversation and of its abandoned replies, and what the last
        # turn was served.
        return 1 + 2 * self.most + 1

    def nbytes(self, tokens: int, records: int) -> int:
        """Of so many tokens in so many records."""
        codec = self.policy.codec
        (size,) = {record.plan(self.policy.checkpoint(n).schema, 1).record_bytes for n in (9, 9999)}
        rows = 2 * tokens + (self.most + 1) * self.reply_tokens
        return (
            self.states * (size + EXTENT_UNIT_BYTES)
            + rows * codec.row_bytes
            + records * (codec.record_overhead_bytes + EXTENT_UNIT_BYTES)
        )


def test_fifty_turns_keep_a_bounded_number_of_checkpoints_and_bytes(directory: Path) -> None:
    config = lfm2_config(max_position_embeddings=8192)
    # Long enough for a checkpoint at its end.
    bound = Bound(config, most=4, reply_tokens=TOKENS_APART_MIN)
    with (
        start_cachestore(
            directory,
            program=hasty.program(branch_idle_seconds=0.0),
            budget="256MiB",
            checkpoints_max=bound.most,
        ) as store,
        serving(directory, config, *where(store), "--cache-codec", "none") as engine,
    ):
        said = [("system", "Be brief."), ("user", "Hello there")]
        asked = 0
        for turn in range(50):
            # Some bytes of a reply are no text, so that a turn often goes on from its prompt.
            _, text, usage = ask(engine, chat(*said), bound.reply_tokens)
            assert usage.cached_tokens >= asked - 1
            asked = usage.prompt_tokens
            settled(store, engine)
            held = store.stats()
            assert held.checkpoints <= bound.states
            assert held.bytes_used <= bound.nbytes(asked, held.records)
            said += [("assistant", text), ("user", f"{turn}?")]
        # Two of each turn were taken, and one at a stride.
        assert held.checkpoints + held.checkpoints_surplus >= 100
        # Records that no checkpoint is behind are gone.
        with store.client() as client:
            entries = list(client.entries())
        assert sum(entry.checkpoint > 0 for entry in entries) == held.checkpoints
        rows = {entry.span.record_id for entry in entries if not entry.checkpoint}
        assert rows <= {entry.parent_record_id for entry in entries}


# Rows of the prompt are in their extents by then, its checkpoint is not, or not committed.
BETWEEN = (
    Death("before", "engine.pack:write_checkpoint"),
    Death("after", "engine.pack:write_checkpoint"),
    Death("before", "cachestore.client:Client.commit"),
)
PROMPT = [(3 * n + n * n) % 256 for n in range(70)]


@pytest.mark.parametrize("death", BETWEEN, ids=str)
def test_an_engine_that_dies_between_rows_and_checkpoint_leaves_neither(
    directory: Path, cachestore: Cachestore, death: Death
) -> None:
    model = save_tiny_model(directory / "model", CONFIGS["qwen3_next"])
    program = death.program("engine")
    with start_engine(directory, model, *where(cachestore), program=program) as engine:
        with contextlib.suppress(grpc.RpcError):
            while True:  # until the digest is known, nothing is stored
                ask(engine, ids(PROMPT))
        assert engine.process.wait(timeout=10) == -9
    until(lambda: cachestore.stats().sessions == 0, "the session to end")
    stats = cachestore.stats()
    assert (stats.records, stats.checkpoints, stats.bytes_used) == (0, 0, 0)
    assert stats.bytes_free == stats.bytes_slabs


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_store_that_dies_while_it_commits_leaves_neither(directory: Path, moment: str) -> None:
    dying = Death(moment, "cachestore.store:Store.commit").program("cachestore")
    with (
        start_cachestore(directory, program=dying) as store,
        serving(directory, CONFIGS["qwen3_next"], *where(store)) as engine,
    ):
        first, _, usage = ask(engine, ids(PROMPT))
        assert usage.match == pb.CACHE_MATCH_MISS
        assert store.process.wait(timeout=10) == -9
        with start_cachestore(directory) as replacement:
            until(lambda: replacement.stats().sessions == 1, "the engine to come back")
            for cached in (0, len(PROMPT) - 1):
                again, _, usage = ask(engine, ids(PROMPT))
                assert (again, usage.cached_tokens) == (first, cached)
                until(lambda: replacement.stats().checkpoints == 1, "the checkpoint")
