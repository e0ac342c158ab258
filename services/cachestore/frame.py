"""What both ends of the session socket agree on: frames, version, and who may talk.

A frame is a 4-byte little-endian length and that many bytes of msgpack: one map with text keys.

    client                                    daemon
      {v: 1, role: "engine" | "admin"}   ->
                                         <-   {v, token, pid, version}
      {slab: id}                         ->
                                         <-   {slab: id, size}  + the descriptor
      ACKNOWLEDGE                        ->                        (not after an error)
                                         <-   {error: text} instead of any answer
      {unmapped: id}                     ->                        (no answer)

The byte comes before the daemon sends another descriptor: macOS may drop one in flight when its
sender goes on too early. End of file, either way, ends the session.
"""

import os
import socket
import struct
import sys
from typing import Any

import msgpack

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 4096
HEADER_BYTES = 4
ACKNOWLEDGE = b"\x06"
ROLES = ("engine", "admin")
SESSION_METADATA = "cachestore-session"

_SOL_LOCAL, _LOCAL_PEERCRED = 0, 1  # macOS; the socket module has no names for them

Frame = dict[str, Any]


class FrameError(Exception):
    """Bytes that are not a frame, or a frame that is not expected here."""


def encode(frame: Frame) -> bytes:
    body: bytes = msgpack.packb(frame)
    assert len(body) <= FRAME_BYTES_MAX
    return struct.pack("<I", len(body)) + body


def body_bytes(header: bytes) -> int:
    """Length of the body that follows `header`."""
    (length,) = struct.unpack("<I", header)
    if not 0 < length <= FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {length} bytes; 1 to {FRAME_BYTES_MAX} are possible")
    return int(length)


def decode(body: bytes) -> Frame:
    try:
        frame = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise FrameError("a frame that is not msgpack") from error
    if not isinstance(frame, dict) or not all(isinstance(key, str) for key in frame):
        raise FrameError("a frame that is not a map with text keys")
    return frame


def integer(frame: Frame, key: str) -> int:
    """The non-negative integer that `frame` must have at `key`."""
    value = frame.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FrameError(f"{key}: not a number: {value!r:.40}")
    return value


def text(frame: Frame, key: str) -> str:
    value = frame.get(key)
    if not isinstance(value, str):
        raise FrameError(f"{key}: not text: {value!r:.40}")
    return value


def trusted_peer(peer: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is ours, or root's."""
    return _peer_uid(peer) in (os.geteuid(), 0)


def _peer_uid(peer: socket.socket) -> int:
    if sys.platform == "linux":
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _pid, uid, _gid = struct.unpack("3i", credentials)
    else:
        # struct xucred: version (0), uid, and groups that do not matter here.
        credentials = peer.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 76)
        version, uid = struct.unpack_from("2I", credentials)
        if version != 0:
            raise OSError(f"unknown version {version} of struct xucred")
    return int(uid)
