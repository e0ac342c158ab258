"""The model of the soak: right replies are known without an engine, wrong rows change them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cachestore import record
from tests.support.daemons import Cachestore
from tests.support.engines import InProcess, in_process
from tests.support.fingerprints import Fingerprints

Array = npt.NDArray[Any]

PROMPT = [(7 * n + n * n) % 256 for n in range(600)]
FINGERPRINTS = Fingerprints()


@pytest.fixture
def engine(directory: Path, cachestore: Cachestore) -> Iterator[InProcess]:
    model = FINGERPRINTS.save(directory / "model")
    with in_process(model, cachestore.socket, cache_codec="none") as running:
        yield running


def test_replies_are_foretold_cold_cached_and_in_a_batch(engine: InProcess) -> None:
    prompts = [PROMPT[:length] for length in (1, 2, 63, 300, 600)]
    expected = [FINGERPRINTS.reply(prompt, 40) for prompt in prompts]
    assert len({tuple(reply) for reply in expected}) == len(prompts)
    assert engine.ask(prompts[-1], 40).tokens == expected[-1]
    engine.settle()
    running = [engine.submit(prompt, 40) for prompt in prompts]
    replies = [engine.finish(request_id) for request_id in running]
    assert [reply.tokens for reply in replies] == expected
    assert [reply.done.usage.cached_tokens for reply in replies] == [0, 1, 62, 299, 599]


def one_number(arrays: list[Array], _: list[Array]) -> None:
    arrays[1][-1, -1, 100, -1] += 1


def a_row_twice(arrays: list[Array], _: list[Array]) -> None:
    for array in arrays:
        array[:, :, 7] = array[:, :, 8]


def a_row_of_another_record(arrays: list[Array], others: list[Array]) -> None:
    for array, other in zip(arrays, others, strict=True):
        array[:, :, 20] = other[:, :, 20]


def rows_moved_by_one(arrays: list[Array], _: list[Array]) -> None:
    for array in arrays:
        array[:, :, :-1] = array[:, :, 1:].copy()


def values_of_the_other_layer(arrays: list[Array], _: list[Array]) -> None:
    arrays[1][0] = arrays[1][1]


@pytest.mark.parametrize(
    "plant",
    [
        one_number,
        a_row_twice,
        a_row_of_another_record,
        rows_moved_by_one,
        values_of_the_other_layer,
    ],
)
def test_a_wrong_row_in_the_store_changes_the_reply(
    engine: InProcess,
    cachestore: Cachestore,
    plant: Callable[[list[Array], list[Array]], None],
) -> None:
    engine.ask(PROMPT)
    engine.settle()
    with cachestore.client() as client:
        tokens = np.array(PROMPT, "<u4").tobytes()
        lease = client.lookup(engine.prefix.status.namespace, tokens, len(PROMPT))
        records = []
        for span in lease.spans:
            writable = client._view(span.extent)[: span.record_bytes]
            records.append(record.read(writable).views(writable))
        expected = FINGERPRINTS.reply(PROMPT, 4)
        assert engine.ask(PROMPT).tokens == expected
        plant(records[0], records[1])
        reply = engine.ask(PROMPT)
        assert reply.done.usage.cached_tokens == len(PROMPT) - 1
        assert reply.tokens != expected
