"""Bytes that are almost what a daemon expects."""

from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st


def mutated(valid: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Valid bytes of which a piece was replaced by other ones, of any length."""

    def replaced(data: bytes, start: int, length: int, noise: bytes) -> bytes:
        return data[:start] + noise + data[start + length :]

    return st.builds(replaced, valid, st.integers(0, 60), st.integers(0, 8), st.binary(max_size=12))


def is_message(of: type[Message], data: bytes) -> bool:
    try:
        of.FromString(data)
    except DecodeError:
        return False
    return True
