"""What is stored, how often, and in how many bytes: real daemons, the codec's formula."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cachestore import record
from engine.v1 import engine_pb2 as pb
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import EngineDaemon, chat, ids, start_engine
from tests.support.models import llama_config, save_tiny_adapter, save_tiny_model
from tests.support.waiting import until

LAYERS, KV_HEADS, WIDTH = 4, 3, 64
ELEMENTS = LAYERS * KV_HEADS * WIDTH * 2
# float32 rows; or 8 bits each, and a float32 scale and bias for each group of 64.
ROW_BYTES = {"none": ELEMENTS * 4, "q8": ELEMENTS + ELEMENTS // 64 * 8}


@dataclass
class Served:
    store: Cachestore
    engine: EngineDaemon

    def ask(self, max_tokens: int, **fields: object) -> tuple[list[int], str, pb.Done]:
        return self.engine.generate(max_tokens=max_tokens, ignore_eos=True, **fields)


@pytest.fixture
def served(directory: Path) -> Iterator[Served]:
    config = llama_config(heads=6, kv_heads=KV_HEADS, layers=LAYERS, hidden_size=192)
    model = save_tiny_model(directory / "model", config)
    with (
        start_cachestore(directory, budget="256MiB") as store,
        start_engine(directory, model, "--cachestore", f"unix:{store.socket}") as engine,
    ):
        yield Served(store, engine)


def payload(store: Cachestore, namespace: bytes, tokens: list[int]) -> tuple[int, int, float]:
    """Rows, bytes of arrays, and bytes by the formula, summed per record by its codec."""
    rows = held = 0
    formula = 0.0
    with store.client(role="admin") as client:
        lease = client.lookup(namespace, np.array(tokens, "<u4").tobytes(), len(tokens))
        for span in lease.spans:
            view = client.record(span)
            found = record.read(view)
            assert (span.first_row, span.rows) == (0, found.rows), "records of a chat are not split"
            rows += span.rows
            held += sum(array.nbytes for array in found.views(view))
            formula += found.rows * ROW_BYTES[found.schema.codec]
        client.release([lease.id])
    return rows, held, formula


def test_a_chat_of_ten_turns_writes_each_row_once(served: Served) -> None:
    tokens = [(5 * n + n * n) % 256 for n in range(120)]
    for turn in range(10):
        reply, _, done = served.ask(12, prompt=ids(tokens))
        if turn:
            assert done.usage.cached_tokens == len(tokens) - 20
            assert done.usage.match == pb.CACHE_MATCH_PREFIX
        tokens += reply
        wait_stored(served.store, len(tokens))
        tokens += [(turn * 31 + 7 * n) % 256 for n in range(20)]
    tokens = tokens[:-20]
    namespace = served.store.stats().namespaces[0].namespace
    rows, held, formula = payload(served.store, namespace, tokens)
    assert rows == len(tokens)
    assert held == pytest.approx(formula, rel=0.01)
    stats = served.store.stats()
    assert stats.writes.rows_inserted == len(tokens)
    assert (stats.writes.rows_duplicate, stats.writes.dropped, stats.writes.refused) == (0, 0, 0)
    assert (stats.tokens, stats.leases, stats.bytes_reserved) == (len(tokens), 0, 0)
    assert stats.bytes_used == pytest.approx(
        formula, rel=0.05
    )  # headers and alignment, 20-row turns


def test_fifty_conversations_hold_their_prefix_once(served: Served) -> None:
    system = "All about the harbour. " * 45
    first = served.ask(4, prompt=chat(("system", system), ("user", "question 0")))[2]
    assert first.usage.prompt_tokens > 1000
    wait_stored(served.store, 1000)
    computed = first.usage.prompt_tokens
    for number in range(1, 50):
        done = served.ask(4, prompt=chat(("system", system), ("user", f"question {number}")))[2]
        assert done.usage.cached_tokens > 1000
        computed += done.usage.prompt_tokens - done.usage.cached_tokens
    until(lambda: served.store.stats().sequences == 100, "all conversations to be stored")
    stats = served.store.stats()
    # Prompt rows that were computed, and the replies' four each: nothing is held twice.
    assert stats.tokens == computed + 50 * 4
    assert stats.writes.rows_inserted == stats.tokens
    assert stats.bytes_used < 1.3 * stats.tokens * ROW_BYTES["q8"]


def test_two_engines_share_one_store(directory: Path, cachestore: Cachestore) -> None:
    model = save_tiny_model(directory / "model")
    flags = ("--cachestore", f"unix:{cachestore.socket}", "--cache-codec", "none")
    prompt = [(3 * n + n * n) % 256 for n in range(500)]
    with (
        start_engine(directory, model, *flags, name="one") as one,
        start_engine(directory, model, *flags, name="two") as two,
    ):
        expected, _, cold = one.generate(prompt=ids(prompt), max_tokens=20, ignore_eos=True)
        wait_stored(cachestore, 520)
        tokens, _, warm = two.generate(prompt=ids(prompt), max_tokens=20, ignore_eos=True)
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 499)
        assert tokens == expected
        assert cachestore.stats().sessions == 2
        assert len(cachestore.stats().namespaces) == 1


def wait_stored(store: Cachestore, tokens: int) -> None:
    until(lambda: store.stats().tokens >= tokens, f"{tokens} tokens to be stored")


def test_other_content_or_policy_never_hits(cachestore: Cachestore) -> None:
    prompt = ids([(3 * n + n * n) % 256 for n in range(300)])
    where = ("--cachestore", f"unix:{cachestore.socket}")
    with short_directory() as directory:
        models = {
            "same": save_tiny_model(directory / "a"),
            "same, elsewhere": save_tiny_model(directory / "b"),
            "other weights": save_tiny_model(directory / "c", seed=1),
            "other depth": save_tiny_model(directory / "d", llama_config(layers=3)),
        }

        def adapter(name: str, seed: int) -> Callable[[], tuple[str, ...]]:
            return lambda: (
                "--adapter-path",
                str(save_tiny_adapter(directory / name, seed=seed)),
            )

        def flags(*words: str) -> Callable[[], tuple[str, ...]]:
            return lambda: words

        runs = [
            ("same", flags(), False),
            ("same", flags(), True),
            ("same, elsewhere", flags(), True),
            ("other weights", flags(), False),
            ("other depth", flags(), False),
            ("same", flags("--cache-codec", "none"), False),
            ("same", flags("--cache-min-quantize-tokens", "9"), False),
            ("same", adapter("a1", 1), False),
            ("same", adapter("a2", 2), False),
            ("same", adapter("a1 again", 1), True),
            # Trained on, and saved in the place of the one before.
            ("same", adapter("a1", 3), False),
            ("same", flags(), True),
        ]
        for number, (name, more, hits) in enumerate(runs):
            words = (*where, *more())
            with start_engine(directory, models[name], *words, name=f"e{number}") as engine:
                held = cachestore.stats().tokens
                done = engine.generate(prompt=prompt, max_tokens=2)[2]
                assert (number, bool(done.usage.cached_tokens)) == (number, hits)
                if not hits:
                    wait_stored(cachestore, held + 300)


def test_an_evicted_conversation_is_computed_again(directory: Path) -> None:
    model = save_tiny_model(directory / "model")
    with start_cachestore(directory, budget="16MiB") as store:
        flags = ("--cachestore", f"unix:{store.socket}", "--cache-codec", "none")
        with start_engine(directory, model, *flags) as engine:
            prompts = [[(n * n + 3 * n + k) % 256 for n in range(1900)] for k in range(8)]
            replies = [
                engine.generate(prompt=ids(p), max_tokens=4, ignore_eos=True) for p in prompts
            ]
            until(lambda: store.stats().evictions > 0, "an eviction")
            stats = store.stats()
            assert stats.bytes_slabs <= 16 << 20
            again = [engine.generate(prompt=ids(p), max_tokens=4, ignore_eos=True) for p in prompts]
            assert [tokens for tokens, _, _ in again] == [tokens for tokens, _, _ in replies]
            stats = store.stats()
            total = stats.bytes_used + stats.bytes_reserved + stats.bytes_free
            assert total + stats.bytes_quarantined == stats.bytes_slabs
