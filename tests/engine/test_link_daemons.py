"""The link against daemons that die, come back and end."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachestore.client import StoreUnavailable
from engine.link import (
    StoreLink,
)
from tests.support import entries
from tests.support.daemons import start_cachestore
from tests.support.waiting import until


@contextlib.contextmanager
def linked(socket: Path) -> Iterator[StoreLink]:
    link = StoreLink(socket, None)
    link.start()
    try:
        yield link
    finally:
        link.close()


def found(link: StoreLink, sequence: bytes) -> int:
    with link.borrow() as client:
        lease = client.lookup(entries.NAMESPACE, sequence, 99)
        if lease.rows:
            client.release([lease.id])
        return lease.rows


def test_a_daemon_that_comes_back_is_used_again(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sequence = entries.tokens(100)
    with start_cachestore(directory) as daemon, linked(daemon.socket) as link:
        with link.borrow() as client:
            entries.write(client, sequence)
        assert found(link, sequence) == 99
        with link.borrow() as old:
            view = old.record(old.lookup(entries.NAMESPACE, sequence, 99).spans[0])
            daemon.kill()
            until(lambda: not link.connected, "the end to be seen")
            with pytest.raises(StoreUnavailable):
                found(link, sequence)
            with start_cachestore(directory) as again:
                until(lambda: link.connected, "the link to come back")
                assert found(link, sequence) == 0
                with link.borrow() as new:
                    assert new is not old
                    entries.write(new, sequence)
                assert found(link, sequence) == 99
                # What was being copied is still there.
                assert bytes(view[:100]) == entries.payload(0, 1)[:100]
                assert again.stats().sessions == 1
    assert caplog.text.count("went away") == 1
    assert caplog.text.count("connected to the cachestore") == 2


def test_a_daemon_that_is_terminated_ends_the_link_too(directory: Path) -> None:
    with start_cachestore(directory) as daemon, linked(daemon.socket) as link:
        assert daemon.terminate() == 0
        until(lambda: not link.connected, "the end to be seen")


def test_closing_while_nobody_is_there_does_not_wait(directory: Path) -> None:
    with linked(directory / "nobody.sock") as link:
        assert not link.connected
    names = [thread.name for thread in threading.enumerate()]
    assert "store-keeper" not in names


def test_the_session_is_gone_from_the_daemon_after_close(directory: Path) -> None:
    with start_cachestore(directory) as daemon:
        with linked(daemon.socket):
            assert daemon.stats().sessions == 1
        until(lambda: daemon.stats().sessions == 0, "the session to end")
