"""What a request may hold. Each refusal names the field, what it was, and what to give."""

from collections.abc import Sequence
from itertools import pairwise

from cachestore.config import (
    CHECKPOINTS_PER_CALL_MAX,
    ENTRIES_PER_CALL_MAX,
    LABEL_BYTES_MAX,
    LEASE_IDS_PER_CALL_MAX,
    NAMESPACE_BYTES,
    RECORD_OVERHEAD_BYTES_MAX,
    ROW_BYTES_MAX,
    TOKEN_BYTES,
    WAIT_SECONDS_MAX,
)
from cachestore.extent import Extent
from cachestore.refusal import RefusalCode, Refused
from cachestore.write import NewCheckpoint


def invalid(message: str) -> Refused:
    return Refused(RefusalCode.INVALID_ARGUMENT, message)


def exhausted(message: str) -> Refused:
    return Refused(RefusalCode.RESOURCE_EXHAUSTED, message)


def require_namespace(namespace: bytes) -> None:
    if len(namespace) != NAMESPACE_BYTES:
        raise invalid(f"namespace has {len(namespace)} bytes; give exactly {NAMESPACE_BYTES}")


def require_limit(limit: int) -> None:
    if not 1 <= limit <= ENTRIES_PER_CALL_MAX:
        raise invalid(f"limit is {limit}; give 1 to {ENTRIES_PER_CALL_MAX}")


def require_sequence(namespace: bytes, tokens: bytes, max_tokens: int) -> int:
    """Returns the number of tokens."""
    require_namespace(namespace)
    if not tokens or len(tokens) % TOKEN_BYTES:
        raise invalid(
            f"tokens has {len(tokens)} bytes; give at least one token, {TOKEN_BYTES} bytes each"
        )
    count = len(tokens) // TOKEN_BYTES
    if count > max_tokens:
        raise invalid(f"tokens has {count} tokens; give at most {max_tokens}")
    return count


def require_rows(field: str, rows: int, tokens: int) -> None:
    if not 0 <= rows <= tokens:
        raise invalid(f"{field} is {rows}; give 0 to the number of tokens, {tokens}")


def require_wait(seconds: float) -> None:
    if not 0 <= seconds <= WAIT_SECONDS_MAX:
        raise invalid(f"wait_seconds is {seconds}; give 0 to {WAIT_SECONDS_MAX}")


def require_record_shape(record_overhead_bytes: int, row_bytes: int, label: str) -> None:
    if not 0 <= record_overhead_bytes <= RECORD_OVERHEAD_BYTES_MAX:
        raise invalid(
            f"record_overhead_bytes is {record_overhead_bytes}; "
            f"give 0 to {RECORD_OVERHEAD_BYTES_MAX}"
        )
    if not 1 <= row_bytes <= ROW_BYTES_MAX:
        raise invalid(f"row_bytes is {row_bytes}; give 1 to {ROW_BYTES_MAX}")
    if len(label.encode()) > LABEL_BYTES_MAX:
        raise invalid(f"label has {len(label.encode())} bytes; give at most {LABEL_BYTES_MAX}")


def require_lease_ids(lease_ids: Sequence[int]) -> None:
    if len(lease_ids) > LEASE_IDS_PER_CALL_MAX:
        raise invalid(f"lease_ids has {len(lease_ids)}; give at most {LEASE_IDS_PER_CALL_MAX}")


def require_sizes(field: str, sizes: Sequence[int], extents: Sequence[Extent]) -> None:
    if len(sizes) != len(extents):
        raise invalid(f"{field} has {len(sizes)}; give one for each of {len(extents)}")
    for index, (size, extent) in enumerate(zip(sizes, extents, strict=True)):
        if not 1 <= size <= extent.length:
            raise invalid(f"{field}[{index}] is {size}; give 1 to {extent.length}")


def require_positions(checkpointed: bool, positions: Sequence[int], tokens: int) -> None:
    if positions and not checkpointed:
        raise invalid("checkpoints are given; they need checkpointed, too")
    if len(positions) > CHECKPOINTS_PER_CALL_MAX:
        raise invalid(f"checkpoints has {len(positions)}; give at most {CHECKPOINTS_PER_CALL_MAX}")
    for index, position in enumerate(positions):
        if not 1 <= position <= tokens:
            raise invalid(
                f"checkpoints[{index}] is at {position}; give 1 to the number of tokens, {tokens}"
            )
    if any(left >= right for left, right in pairwise(positions)):
        raise invalid("checkpoints are not in order; give each position once, ascending")


def require_parting_distance(announced: bool, distance: int) -> None:
    if distance and not announced:
        raise invalid("parting_distance is given; it needs announce and checkpointed, too")


def require_new_checkpoints(checkpoints: Sequence[NewCheckpoint]) -> None:
    for index, new in enumerate(checkpoints):
        if new.nbytes < 1:
            raise invalid(f"checkpoints[{index}] has {new.nbytes} bytes; give at least 1")


def require_kind(checkpointed: bool, held: bool | None) -> None:
    """`held`: what the namespace is; None when that is not known yet."""
    if held is not None and held != checkpointed:
        raise Refused(
            RefusalCode.FAILED_PRECONDITION,
            f"checkpointed is {checkpointed}, but the namespace was begun with {held}",
        )
