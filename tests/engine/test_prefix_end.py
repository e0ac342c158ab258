"""The end of the engine's side of the cachestore: what was given is stored, or counted."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.link import StoreLink
from engine.prefix import Prefix
from tests.support.waiting import until

SECONDS = 30.0


class Link:
    """Nothing of it is used but its end."""

    connected = True
    closed = False

    def close(self) -> None:
        self.closed = True


def tail(number: int) -> Any:
    return SimpleNamespace(nbytes=10, tokens=(number,), rows=(SimpleNamespace(first_token=0),))


@pytest.mark.parametrize(("seconds", "stored"), [(0.05, 1), (None, 3)])
def test_writes_that_no_time_is_left_for_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, stored: int
) -> None:
    link, policy = Link(), SimpleNamespace(codec=SimpleNamespace(name="none"))
    prefix = Prefix(lambda _: None, cast(StoreLink, link), cast(Any, policy))
    began, go_on = threading.Event(), threading.Event()

    def store(_: Any) -> int:
        began.set()
        assert go_on.wait(SECONDS)
        return 0

    monkeypatch.setattr(prefix, "_store", store)
    for number in range(3):
        prefix.write(tail(number), None, None)
    assert began.wait(SECONDS)
    closing = threading.Thread(target=prefix.close, args=(seconds,))
    closing.start()
    given = list(prefix._pending.values())
    if seconds is not None:
        until(lambda: sum(write.cancelled() for write in given) == 2, "two to be dropped")
    assert not link.closed  # the one that runs needs its session
    go_on.set()
    closing.join(SECONDS)
    assert link.closed
    status = prefix.status
    assert (status.writes_committed, status.writes_dropped) == (stored, 3 - stored)
