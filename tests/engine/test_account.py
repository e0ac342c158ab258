"""What is said of a request that its client ended."""

import asyncio
from typing import cast

import grpc
import pytest

from engine.account import Accounts, Context, Outcome
from engine.v1 import engine_pb2 as pb


class Left:
    """The context of a call whose deadline, if it has one, is so many seconds away."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def time_remaining(self) -> float | None:
        return self._seconds


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize(
    ("left", "status"),
    [
        (None, grpc.StatusCode.CANCELLED),
        (5.0, grpc.StatusCode.CANCELLED),
        (0.03, grpc.StatusCode.DEADLINE_EXCEEDED),  # the client's own clock was first
        (-1.0, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_who_leaves_near_the_deadline_was_too_late(
    error: type[BaseException], left: float | None, status: grpc.StatusCode
) -> None:
    accounts = Accounts(lines=False, prompts=False)
    context = cast(Context, Left(left))
    with pytest.raises(error), accounts.of(1, "Generate", pb.Prompt(), context) as account:
        raise error
    assert account.status is status
    assert accounts.outcomes[Outcome.CANCELLED] == 1
