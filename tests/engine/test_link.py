"""The link's keeper thread, one turn at a time on a clock of its own."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import grpc
import pytest

from cachestore.client import LaunchError, StoreRefused, StoreUnavailable
from engine import link as link_module
from engine.link import (
    BACKOFF_SECONDS_MAX,
    PAUSE_SECONDS,
    POLL_SECONDS,
    RENEW_SECONDS,
    StoreLink,
)

SECONDS = 20.0


@dataclass(eq=False)
class FakeClient:
    alive: bool = True
    closed: bool = False
    renewed: list[list[int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    failure: Exception | None = None

    def renew(self, ids: list[int]) -> list[bool]:
        self.renewed.append(sorted(ids))
        self._fail()
        return [True] * len(ids)

    def release(self, ids: list[int]) -> None:
        self.released += ids
        self._fail()

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.alive = False


class Turns:
    """Stands for the keeper's event: it waits until the test lets it go on."""

    def __init__(self) -> None:
        self.waits: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._go: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.sets = 0

    def wait(self, timeout: float) -> None:
        self.waits.put(timeout)
        self._go.get(timeout=SECONDS)

    def set(self) -> None:
        self.sets += 1

    def clear(self) -> None:
        pass

    def let_go(self) -> None:
        self._go.put(None)


class Stage:
    """A link whose daemon and time are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.there = True
        self.clients: list[Any] = []  # each a FakeClient, where the link has a Client
        self.attempts = 0
        self.turns = Turns()
        monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(link_module, "Client", SimpleNamespace(connect=self._connect))
        self.link: StoreLink

    def _connect(self, path: str) -> Any:
        assert path == "/run/cachestore.sock"
        self.attempts += 1
        if not self.there:
            raise StoreUnavailable("nobody listens")
        self.clients.append(FakeClient())
        return self.clients[-1]

    def make(self, spawn: Callable[[threading.Event], None] | None = None) -> Self:
        self.link = StoreLink(Path("/run/cachestore.sock"), spawn)
        self.link._wake = self.turns  # type: ignore[assignment]
        return self

    def start(self, spawn: Callable[[threading.Event], None] | None = None) -> Self:
        self.make(spawn).link.start()
        self.waited = self.turns.waits.get(timeout=SECONDS)
        return self

    def turn(self, seconds: float = 0.0) -> float:
        """Let the keeper do one round, that much later; how long it then wants to wait."""
        self.now += seconds
        self.turns.let_go()
        return self.turns.waits.get(timeout=SECONDS)

    def borrowable(self) -> bool:
        try:
            with self.link.borrow():
                return True
        except StoreUnavailable:
            return False


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(monkeypatch)
    yield made
    made.turns.let_go()
    made.link.close()
    assert all(client.closed for client in made.clients)
    assert not made.link._keeper.is_alive()


def test_it_is_connected_once_started(stage: Stage) -> None:
    stage.start()
    assert stage.link.connected
    with stage.link.borrow() as client:
        assert client is stage.clients[0]
    stage.turn()
    assert stage.attempts == 1


def test_away_at_the_start_is_said_once_and_tried_ever_more_seldom(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.there = False
    stage.start()
    assert not stage.link.connected
    assert not stage.borrowable()
    waits = [stage.waited, *(stage.turn() for _ in range(6))]
    assert waits == sorted(waits)
    assert POLL_SECONDS < waits[0] < waits[-1] == BACKOFF_SECONDS_MAX
    assert len(caplog.records) == 1
    stage.there = True
    assert stage.turn() == POLL_SECONDS
    assert stage.link.connected
    # The next time is another story: said again, and tried often at first.
    stage.there = False
    stage.clients[-1].alive = False
    assert stage.turn() == waits[0]
    stage.turn()
    away = [record for record in caplog.records if "nothing is cached" in record.message]
    assert len(away) == 2


def test_a_session_that_ended_is_replaced_and_closed(stage: Stage) -> None:
    first = stage.start().clients[0]
    first.alive = False
    assert not stage.link.connected
    assert not stage.borrowable()
    stage.turn()
    assert stage.link.connected
    assert first.closed
    with stage.link.borrow() as client:
        assert client is stage.clients[1]


def test_a_client_is_not_closed_while_somebody_copies(stage: Stage) -> None:
    first = stage.start().clients[0]
    with stage.link.borrow(), stage.link.borrow():
        first.alive = False
        stage.turn()
        assert stage.link.connected
        assert not first.closed
        with stage.link.borrow() as second:
            assert second is stage.clients[1]
            stage.turn()
            assert not first.closed
    woken = stage.turns.sets
    assert woken  # by the one who gave the dead one back
    stage.turn()
    assert first.closed
    assert not stage.clients[-1].closed


def test_a_call_that_fails_pauses_the_link_for_a_moment(stage: Stage) -> None:
    stage.start()
    with pytest.raises(StoreUnavailable, match="too slow"), stage.link.borrow():
        raise StoreUnavailable("too slow")
    assert not stage.borrowable()
    assert stage.link.connected
    stage.turn(PAUSE_SECONDS - 0.01)
    assert not stage.borrowable()
    stage.turn(0.02)
    assert stage.borrowable()
    assert stage.attempts == 1


@pytest.mark.parametrize(
    "error",
    [StoreRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), ValueError("ours"), OSError()],
)
def test_other_failures_do_not_pause_it(stage: Stage, error: Exception) -> None:
    stage.start()
    with pytest.raises(type(error)), stage.link.borrow():
        raise error
    assert stage.borrowable()


def test_a_new_session_is_not_paused_for_the_old_ones_failure(stage: Stage) -> None:
    stage.start()
    with contextlib.suppress(StoreUnavailable), stage.link.borrow():
        raise StoreUnavailable("too slow")
    stage.clients[0].alive = False
    stage.turn()
    assert stage.borrowable()
    # Neither does a call that the end of the old session broke pause the new one.
    with contextlib.suppress(StoreUnavailable), stage.link.borrow():
        stage.clients[1].alive = False
        stage.turn()
        raise StoreUnavailable("the session has ended")
    assert stage.borrowable()


def test_leases_are_renewed_until_they_are_dropped(stage: Stage) -> None:
    client = stage.start().clients[0]
    stage.link.hold(client, 7)
    stage.link.hold(client, 9)
    stage.turn()
    assert client.renewed == []
    stage.turn(RENEW_SECONDS)
    assert client.renewed == [[7, 9]]
    stage.link.drop(7)
    assert client.released == [7]
    stage.turn(RENEW_SECONDS)
    assert client.renewed[1:] == [[9]]
    stage.link.drop(9)
    stage.link.drop(9)
    stage.turn(RENEW_SECONDS)
    # Without leases it asks all the same: the answer tells which slabs to unmap.
    assert (client.renewed[2:], client.released) == ([[]], [7, 9])


@pytest.mark.parametrize(
    "failure", [StoreUnavailable("slow"), StoreRefused(grpc.StatusCode.INVALID_ARGUMENT, "no")]
)
def test_a_lease_that_cannot_be_renewed_or_released_harms_nobody(
    stage: Stage, failure: Exception
) -> None:
    client = stage.start().clients[0]
    client.failure = failure
    stage.link.hold(client, 7)
    stage.turn(RENEW_SECONDS)
    stage.turn(RENEW_SECONDS)
    assert client.renewed == [[7], [7]]
    stage.link.drop(7)
    assert client.released == [7]


def test_leases_of_an_ended_session_are_forgotten(stage: Stage) -> None:
    first = stage.start().clients[0]
    stage.link.hold(first, 7)
    first.alive = False
    stage.turn(RENEW_SECONDS)
    stage.link.hold(stage.clients[1], 8)
    stage.link.drop(7)
    stage.turn(RENEW_SECONDS)
    assert (first.renewed, first.released) == ([], [])
    assert stage.clients[1].renewed == [[], [8]]


# --- spawning ----------------------------------------------------------------------------


def test_the_daemon_is_started_when_nobody_listens(stage: Stage) -> None:
    stage.there = False
    spawned: list[int] = []

    def spawn(_: threading.Event) -> None:
        spawned.append(stage.attempts)
        stage.there = True

    stage.start(spawn)
    assert stage.link.connected
    assert spawned == [1]
    stage.there = False
    stage.clients[0].alive = False
    stage.turn()
    assert stage.link.connected
    assert len(spawned) == 2


def test_a_daemon_that_is_there_is_not_started(stage: Stage) -> None:
    spawned: list[threading.Event] = []
    stage.start(spawned.append)
    assert stage.link.connected
    assert not spawned


@pytest.mark.parametrize(
    "error", [LaunchError("no memory"), OSError(28, "No space left on device")]
)
def test_a_daemon_that_does_not_start_is_tried_again_later(
    stage: Stage, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stage.there = False
    starts = [0]

    def spawn(_: threading.Event) -> None:
        starts[0] += 1
        if starts[0] < 4:
            raise error
        stage.there = True

    stage.start(spawn)
    assert not stage.link.connected
    assert str(error) in caplog.text
    for _ in range(3):
        stage.turn()
    assert stage.link.connected
    assert starts == [4]


# --- closing -----------------------------------------------------------------------------


def test_closing_ends_the_session_and_the_keeper(stage: Stage) -> None:
    client = stage.start().clients[0]
    stage.turns.let_go()
    stage.link.close()
    assert client.closed
    assert not stage.link.connected
    assert not stage.borrowable()
    stage.link.close()


def test_closing_closes_old_clients_too(stage: Stage) -> None:
    first = stage.start().clients[0]
    borrow = stage.link.borrow()
    borrow.__enter__()
    first.alive = False
    stage.turn()
    assert not first.closed
    borrow.__exit__(None, None, None)
    stage.turns.let_go()
    stage.link.close()
    assert first.closed


def test_closing_one_that_was_never_started(stage: Stage) -> None:
    stage.make().link.close()
    assert stage.attempts == 0


def test_a_lookup_that_still_waits_is_ended_by_closing(stage: Stage) -> None:
    client = stage.start().clients[0]

    def look_up() -> None:
        with stage.link.borrow():
            stage.turns.let_go()
            stage.link.close()
            assert client.closed
            raise StoreUnavailable("the client is closed")

    with pytest.raises(StoreUnavailable, match="closed"):
        look_up()
