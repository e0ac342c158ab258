from enum import Enum


class RefusalCode(Enum):
    """Named as the gRPC status that the service answers with."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class Refused(Exception):
    """A request that the caller got wrong or that does not fit. Nothing was changed by it, except
    that records may have been evicted for room that still did not suffice."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class NeedSlab(Exception):
    """The store wants a slab of `bytes` bytes: add one and repeat the call, which left no trace."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"a slab of {size_bytes} bytes is needed")
        self.bytes = size_bytes
