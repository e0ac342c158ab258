"""What the session protocol learns of its peer from the system."""

import os
import socket

from cachestore import frame


def test_the_peers_uid_is_what_the_system_says() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert frame._peer_uid(ours) == os.geteuid()
