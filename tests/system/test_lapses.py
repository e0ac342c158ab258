"""Clients that are too slow: what they hold lapses, and nobody ever sees wrong bytes."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cachestore.client import StoreRefused
from engine import attach
from tests.support import entries, hasty
from tests.support.daemons import Cachestore, start_cachestore
from tests.support.engines import in_process
from tests.support.models import Config, llama_config, qwen3_next_config, save_tiny_model
from tests.support.waiting import until

ROWS = 600
SEQUENCE = entries.tokens(ROWS)
SECONDS = 1.5


@pytest.fixture
def hasty_store(directory: Path) -> Iterator[Cachestore]:
    program = hasty.program(SECONDS)
    with start_cachestore(directory, program=program, budget="16MiB") as daemon:
        yield daemon


def fill(store: Cachestore, first: int = 1) -> None:
    """Write more than the budget, so that all leaves that may leave."""
    with store.client() as client:
        for number in range(first, first + 30):
            sequence = entries.tokens(ROWS, first=10_000 * number)
            assert entries.write(client, sequence) == ROWS
        assert client.stats().evictions > 0


@pytest.mark.parametrize("ending", ["a late commit", "the end of its session"])
def test_a_writer_that_stalls_in_the_middle_of_a_copy(hasty_store: Cachestore, ending: str) -> None:
    with hasty_store.client() as reader, hasty_store.client() as stalled:
        reservation = stalled.reserve(
            entries.NAMESPACE, SEQUENCE, 0, entries.OVERHEAD_BYTES, entries.ROW_BYTES, ""
        )
        extents = [stalled.extent(piece) for piece in reservation.pieces]
        extents[0][:1000] = b"\xee" * 1000
        until(lambda: hasty_store.stats().reservations == 0, "the reservation to lapse")
        quarantined = sum(map(len, extents))
        assert hasty_store.stats().bytes_quarantined == quarantined

        # Others write the same rows, and as much else as there is room for.
        assert entries.write(reader, SEQUENCE) == ROWS
        lease = reader.lookup(entries.NAMESPACE, SEQUENCE, ROWS)
        for extent in extents:
            extent[:] = b"\xee" * len(extent)  # it wakes up
        assert entries.is_intact(reader, lease)
        fill(hasty_store)
        for extent in extents:
            extent[:] = b"\xdd" * len(extent)
        stats = hasty_store.stats()
        assert (stats.bytes_quarantined, stats.bytes_reserved) == (quarantined, 0)
        last = entries.tokens(ROWS, first=10_000 * 30)
        assert entries.is_intact(reader, reader.lookup(entries.NAMESPACE, last, ROWS))

        if ending == "a late commit":
            with pytest.raises(StoreRefused) as refused:
                stalled.commit(reservation.id, [len(extent) for extent in extents])
            assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        else:
            stalled.close()
        until(lambda: hasty_store.stats().bytes_quarantined == 0, "the bytes to come back")
    assert hasty_store.stats().writes.dropped == 1


def test_a_slow_reader_keeps_what_it_reads(directory: Path) -> None:
    with (
        start_cachestore(directory, budget="16MiB") as store,
        store.client() as reader,
        store.client() as writer,
    ):
        entries.write(writer, SEQUENCE)
        lease = reader.lookup(entries.NAMESPACE, SEQUENCE, ROWS)
        half = bytes(reader.record(lease.spans[0]))
        fill(store)
        assert half == bytes(reader.record(lease.spans[0]))
        assert entries.is_intact(reader, lease)
        assert reader.renew([lease.id]) == [True]
        reader.release([lease.id])
        fill(store, first=31)
        assert reader.lookup(entries.NAMESPACE, SEQUENCE, ROWS).rows == 0


@pytest.mark.parametrize("config", [llama_config(), qwen3_next_config()], ids=["rows", "hybrid"])
def test_what_leaves_while_it_is_copied_is_not_used(
    directory: Path, hasty_store: Cachestore, monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    model = save_tiny_model(directory / "model", config)
    prompt = [(7 * n + n * n) % 256 for n in range(300)]
    with (
        in_process(model, None) as cold,
        in_process(model, hasty_store.socket, cache_codec="none") as engine,
    ):
        expected = cold.ask(prompt, 6).tokens
        engine.ask(prompt, 1)
        engine.settle()
        held = hasty_store.stats()
        assert held.tokens == len(prompt) - engine.prefix.checkpointed
        assert held.checkpoints == engine.prefix.checkpointed
        copy: Callable[..., int] = attach.Block.copy
        copying = threading.Lock()

        def slowly(block: attach.Block) -> int:
            with copying:
                if attach.Block.copy is slowly:  # the first of the threads that share the block
                    until(lambda: hasty_store.stats().leases == 0, "the lease to lapse")
                    fill(hasty_store)
                    assert hasty_store.stats().checkpoints == 0
                    monkeypatch.setattr(attach.Block, "copy", copy)
            return copy(block)

        monkeypatch.setattr(attach.Block, "copy", slowly)
        reply: Any = engine.ask(prompt, 6)
        assert reply.tokens == expected
        assert reply.done.usage.cached_tokens == 0
