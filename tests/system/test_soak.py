"""A small soak (tests/soak), and proof that it would notice."""

from xml.etree import ElementTree

import pytest

from tests.soak import plot
from tests.soak.__main__ import report
from tests.soak.clients import Stream
from tests.soak.operations import PLACES
from tests.soak.run import odd_entries, run
from tests.soak.watch import (
    DESCRIPTORS_GROWTH_MAX,
    GROWTH_BYTES_MAX,
    THREADS_GROWTH_MAX,
    Growth,
)


@pytest.mark.slow
def test_no_wrong_row_and_nothing_left_while_everything_dies() -> None:
    outcome = run(360, seed=1)
    found = report(outcome)
    assert sum(sum(row.values()) for row in found["operations"].values()) == 360
    assert {restart.place for _, restart in outcome.restarts} == set(PLACES)
    assert outcome.tokens_checked > 1000
    assert all(found["lookups"].values())
    assert found["evictions"] > 0
    drawn = ElementTree.fromstring(plot.svg(outcome))
    lives = {(sample.place, sample.life) for sample in outcome.watch.samples}
    lives |= {("slabs", sample.life) for sample in outcome.watch.store_samples}
    assert len(drawn.findall("{*}polyline")) == len(lives)


@pytest.mark.parametrize("tokens", [[2], [1, 3], [1, 2, 4]])
def test_a_wrong_token_is_noticed_however_the_reply_ended(tokens: list[int]) -> None:
    with pytest.raises(AssertionError, match="WRONG ROWS"):
        Stream([1, 2, 3], tokens).check([9])


@pytest.mark.parametrize(
    ("more_bytes", "more_descriptors", "more_threads"), [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
)
def test_a_leak_is_noticed(more_bytes: int, more_descriptors: int, more_threads: int) -> None:
    def growth(memory_bytes: int, descriptors: int, threads: int) -> Growth:
        return Growth("one", 99, (0, memory_bytes), (9, 9 + descriptors), (5, 5 + threads))

    most = (GROWTH_BYTES_MAX, DESCRIPTORS_GROWTH_MAX, THREADS_GROWTH_MAX)
    growth(*most).check()
    more = (more_bytes, more_descriptors, more_threads)
    with pytest.raises(AssertionError):
        growth(*map(sum, zip(most, more, strict=True))).check()


def test_an_error_in_a_log_is_noticed_with_its_traceback() -> None:
    traceback = "Traceback (most recent call last):\n  File ...\nValueError: no\n"
    said = "2026-11-28 23:57:50,093 {}: something\n"
    fine = said.format("INFO cachestore.server")
    of_grpc = (
        "2026-11-28 23:57:50,093 ERROR grpc._cython.cygrpc: Unexpected [{}] raised\n" + traceback
    )
    gone, bug = of_grpc.format("ExecuteBatchError"), of_grpc.format("KeyError")
    error = said.format("ERROR cachestore.calls") + traceback
    fatal = said.format("CRITICAL engine.server")
    of_a_thread = "Exception in thread Thread-1:\n" + traceback
    assert odd_entries(fine + gone + fine) == []
    assert odd_entries(fine + error + gone + bug + fine + fatal) == [error, bug, fatal]
    assert odd_entries(gone + of_a_thread + fine) == [gone + of_a_thread]
    assert odd_entries(traceback) == [traceback]
