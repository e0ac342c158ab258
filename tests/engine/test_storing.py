"""What the writer stores when the store has no room for all of it, or loses its path."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from cachestore.client import Client, Reservation, StoreRefused
from engine.config import CHECKPOINT_STRIDE_MIN
from engine.storing import Destination, Stored
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import InProcess, in_process
from tests.support.models import qwen3_next_config, save_tiny_model

STRIDE = CHECKPOINT_STRIDE_MIN
PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, 256, 2 * STRIDE + 40)]
LAST = len(PROMPT) - 1
# At each stride and before the last token.
ALL = [STRIDE, 2 * STRIDE, LAST]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with short_directory() as directory:
        yield save_tiny_model(directory / "model", qwen3_next_config())


@pytest.fixture
def store() -> Iterator[Cachestore]:
    with short_directory() as directory, start_cachestore(directory) as made:
        yield made


class Crowded:
    """A store that refuses more than so many checkpoints at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, code: grpc.StatusCode) -> None:
        self.asked: list[list[int]] = []
        reserve = Client.reserve

        def refusing(client: Client, *args: Any, **fields: Any) -> Reservation:
            self.asked.append([each.position for each in fields["checkpoints"]])
            if len(self.asked[-1]) > most:
                raise StoreRefused(code, "no room")
            return reserve(client, *args, **fields)

        monkeypatch.setattr(Client, "reserve", refusing)


def cached(engine: InProcess, *more: int) -> int:
    """Tokens of the prompt, and what follows it, that were cached."""
    reply = engine.ask([*PROMPT, *more], max_tokens=1)
    engine.settle()
    return reply.done.usage.cached_tokens


def test_the_deepest_checkpoint_is_stored_when_all_do_not_fit(
    model: Path, store: Cachestore, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded = Crowded(monkeypatch, 1, grpc.StatusCode.RESOURCE_EXHAUSTED)
    with in_process(model, store.socket, checkpoint_stride=STRIDE) as engine:
        assert cached(engine) == 0
        assert crowded.asked == [ALL, [LAST]]
        assert engine.prefix.status.writes_dropped == 0
        assert cached(engine, 7) == LAST


@pytest.mark.parametrize(
    ("most", "code", "attempts"),
    [
        (0, grpc.StatusCode.RESOURCE_EXHAUSTED, [ALL, [LAST]]),
        (1, grpc.StatusCode.FAILED_PRECONDITION, [ALL]),
    ],
)
def test_nothing_is_stored_when_that_does_not_fit_either_or_is_not_why(
    model: Path,
    store: Cachestore,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    code: grpc.StatusCode,
    attempts: list[list[int]],
) -> None:
    crowded = Crowded(monkeypatch, most, code)
    with in_process(model, store.socket, checkpoint_stride=STRIDE) as engine:
        assert cached(engine) == 0
        assert crowded.asked == attempts
        assert engine.prefix.status.writes_dropped == 1
        assert cached(engine, 7) == 0


def test_a_write_whose_rows_leave_again_is_dropped_and_no_other(
    tmp_path: Path, store: Cachestore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(60))
    with in_process(save_tiny_model(tmp_path / "model"), store.socket) as engine:
        with monkeypatch.context() as evicted:
            evicted.setattr(Destination, "_store_some", lambda *_: Stored(0, 0))
            engine.ask(tokens, max_tokens=1)
            engine.settle()
        assert engine.prefix.status.writes_dropped == 1
        # At once: the store is not taken for one that does not answer.
        engine.ask(tokens, max_tokens=1)
        engine.settle()
        assert engine.prefix.status.writes_dropped == 1
        assert engine.ask(tokens).done.usage.cached_tokens == 59
