"""Claims that sessions hold for a limited time: leases of readers, reservations of writers."""

import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Held = TypeVar("Held")


def random_id() -> int:
    """Unguessable, fits a signed 64-bit integer, never 0."""
    return secrets.randbits(63) or 1


@dataclass(frozen=True, slots=True)
class _Claim(Generic[Held]):
    session: int
    held: Held
    deadline: float


class Claims(Generic[Held]):
    """Things held under an id, each bound to the session that opened it.

    A claim ends when it is closed, when its session ends, or at its deadline, whichever comes
    first; the caller then undoes what it stood for. To any other session it does not exist.
    All claims last equally long and time never runs backwards, so they are kept in the order of
    their deadlines simply by moving a renewed one to the end.
    """

    def __init__(self, seconds: float, new_id: Callable[[], int] = random_id) -> None:
        self._seconds = seconds
        self._new_id = new_id
        self._claims: OrderedDict[int, _Claim[Held]] = OrderedDict()
        self._of_session: dict[int, set[int]] = {}
        self.changes = 0  # since it was made

    def __len__(self) -> int:
        return len(self._claims)

    def count(self, session: int) -> int:
        return len(self._of_session.get(session, ()))

    def held(self) -> list[Held]:
        return [claim.held for claim in self._claims.values()]

    def open(self, session: int, held: Held, now: float) -> int:
        claim_id = self._new_id()
        while claim_id in self._claims:
            claim_id = self._new_id()
        self._claims[claim_id] = _Claim(session, held, now + self._seconds)
        self._of_session.setdefault(session, set()).add(claim_id)
        self.changes += 1
        return claim_id

    def get(self, session: int, claim_id: int) -> Held | None:
        claim = self._claims.get(claim_id)
        return claim.held if claim is not None and claim.session == session else None

    def renew(self, session: int, claim_id: int, now: float) -> bool:
        """Move the deadline; False when this session has no such claim (any more)."""
        held = self.get(session, claim_id)
        if held is None:
            return False
        self._claims[claim_id] = _Claim(session, held, now + self._seconds)
        self._claims.move_to_end(claim_id)
        self.changes += 1
        return True

    def close(self, session: int, claim_id: int) -> Held | None:
        """End a claim; None when this session has no such claim (any more)."""
        held = self.get(session, claim_id)
        if held is not None:
            self._remove(claim_id)
        return held

    def close_session(self, session: int) -> list[Held]:
        return [self._remove(claim_id).held for claim_id in list(self._of_session.get(session, ()))]

    def lapse(self, now: float) -> list[tuple[int, int, Held]]:
        """End the claims whose deadline has come: (session, id, held) of each."""
        lapsed: list[tuple[int, int, Held]] = []
        while self._claims:
            claim_id, claim = next(iter(self._claims.items()))
            if claim.deadline > now:
                break
            self._remove(claim_id)
            lapsed.append((claim.session, claim_id, claim.held))
        return lapsed

    def checks(self) -> Iterator[int]:
        """Verify every invariant, as Store.checks does."""
        before = -math.inf
        for claim_id, claim in self._claims.items():
            assert before <= claim.deadline
            before = claim.deadline
            assert claim_id in self._of_session[claim.session]
            yield 1
        assert all(self._of_session.values())
        assert sum(map(len, self._of_session.values())) == len(self._claims)

    def _remove(self, claim_id: int) -> _Claim[Held]:
        claim = self._claims.pop(claim_id)
        of_session = self._of_session[claim.session]
        of_session.remove(claim_id)
        if not of_session:
            del self._of_session[claim.session]
        self.changes += 1
        return claim
