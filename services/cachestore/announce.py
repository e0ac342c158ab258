"""Rows that somebody is computing and will commit: others can wait for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cachestore.checkpoints import deepest
from cachestore.config import TOKEN_BYTES
from cachestore.tree import shared_tokens

# Who waits for somebody's rest of a prompt may have half as much to compute himself, at least:
# two prompts that are computed side by side take twice as long.
REST_RATIO_MAX = 2


@dataclass(slots=True, eq=False)
class Announcement:
    """`rows_done` of the announced rows can be served, whoever wrote them.

    It never falls: rows that were evicted again will not come a second time. Rows of a
    checkpointed namespace can be served up to a checkpoint; `checkpoints` are the positions of
    those to come, and None where rows need none.
    """

    session: int
    namespace: bytes
    tokens: bytes
    rows_done: int
    checkpoints: tuple[int, ...] | None

    def worth(self, shared: int) -> int:
        """Rows that can be served once all has come, to whom the first `shared` are common."""
        return shared if self.checkpoints is None else deepest(self.checkpoints, shared)

    @property
    def rest(self) -> int:
        """Tokens that are computed before the last of the announced rows can be served."""
        return len(self.tokens) // TOKEN_BYTES - self.rows_done


class Announcements:
    """What is announced now. Each announcement lives with a lease, and ends with it.

        tokens announced   ├──────── rows_done ────────┼─────── to come ──────────┤
        somebody's tokens  ├── held ──┼─ evicted again ┼─ worth waiting ─┤ others

    What is held of both is among rows_done: it was when the announcement began, or was
    committed since. Nobody begins to wait for fewer than `rows_min` rows, but whoever has waited
    goes on for an eighth of that: what the first of a crowd leaves is computed once, too. Nor for
    somebody who has far more to compute than he would have himself, for a prompt is committed
    when all of it is computed: a question does not wait for a book that begins as it does.
    Waiting cannot go round in a circle: a lookup that waits has announced nothing yet and holds
    no lease, so what others wait for never waits itself.
    """

    def __init__(self, rows_min: int, tokens_max_per_session: int) -> None:
        self._rows_min = rows_min
        self._few_rows = max(1, rows_min // 8)
        self._tokens_max = tokens_max_per_session
        self._of_namespace: dict[bytes, dict[Announcement, None]] = {}
        self._tokens_of_session: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_namespace.values()))

    def open(
        self,
        session: int,
        namespace: bytes,
        tokens: bytes,
        rows_held: int,
        checkpoints: tuple[int, ...] | None = None,
    ) -> Announcement | None:
        """None when nobody could wait for it, or when the session has announced too much."""
        count = len(tokens) // TOKEN_BYTES
        total = self._tokens_of_session.get(session, 0) + count
        announcement = Announcement(session, namespace, tokens, rows_held, checkpoints)
        few = announcement.worth(count) - rows_held < self._few_rows
        if few or total > self._tokens_max:
            return None
        self._of_namespace.setdefault(namespace, {})[announcement] = None
        self._tokens_of_session[session] = total
        return announcement

    def close(self, announcement: Announcement) -> None:
        others = self._of_namespace[announcement.namespace]
        del others[announcement]
        if not others:
            del self._of_namespace[announcement.namespace]
        session = announcement.session
        self._tokens_of_session[session] -= len(announcement.tokens) // TOKEN_BYTES
        if self._tokens_of_session[session] == 0:
            del self._tokens_of_session[session]

    def commit(
        self, namespace: bytes, tokens: bytes, checkpoints: tuple[int, ...] | None = None
    ) -> bool:
        """Note that all rows of `tokens` are held now, and checkpoints at these positions where
        rows need them; whether that was news to anybody."""
        news = False
        for announcement in self._of_namespace.get(namespace, ()):
            shared = _shared(tokens, announcement.tokens)
            done = shared if checkpoints is None else deepest(checkpoints, shared)
            if done > announcement.rows_done:
                announcement.rows_done = done
                news = True
        return news

    def rows_to_come(
        self, namespace: bytes, tokens: bytes, rows_held: int = 0, waited: bool = False
    ) -> int:
        """Rows of `tokens` that somebody has announced and that are to come; 0 if that is few, or
        not worth waiting for.

        `rows_held` can be served already: a checkpoint of another sequence may be deeper than
        those announced, and is not among what is done of them. Costs one comparison of tokens for
        each announcement of the namespace.
        """
        to_come, count = 0, len(tokens) // TOKEN_BYTES
        for announcement in self._of_namespace.get(namespace, ()):
            worth = announcement.worth(_shared(tokens, announcement.tokens))
            held = max(announcement.rows_done, rows_held)
            if announcement.rest <= REST_RATIO_MAX * (count - held):
                to_come = max(to_come, worth - held)
        return to_come if to_come >= (self._few_rows if waited else self._rows_min) else 0

    def parting(self, namespace: bytes, tokens: bytes, rows_held: int) -> int:
        """Where `tokens` part from all that is announced, and from the `rows_held` of them, in
        whole eighths of a record: those who have some more in common by chance part at one place.
        Costs as much as rows_to_come.
        """
        others = self._of_namespace.get(namespace, ())
        parting = max([rows_held, *(_shared(tokens, other.tokens) for other in others)])
        return parting - parting % self._few_rows

    def checks(self, of_leases: Sequence[Announcement]) -> Iterator[int]:
        """Verify every invariant, as Store.checks does, given the announcements of all leases."""
        expected = set(of_leases)
        assert len(self) == len(expected) == len(of_leases)
        tokens: dict[int, int] = {}
        for namespace, others in self._of_namespace.items():
            assert others
            for one in others:
                count = len(one.tokens) // TOKEN_BYTES
                assert one in expected
                assert one.namespace == namespace
                assert 0 <= one.rows_done <= count
                assert all(1 <= position <= count for position in one.checkpoints or ())
                tokens[one.session] = tokens.get(one.session, 0) + count
                yield 1
        assert tokens == self._tokens_of_session
        assert max(tokens.values(), default=0) <= self._tokens_max


def _shared(tokens: bytes, announced: bytes) -> int:
    if tokens.startswith(announced) or announced.startswith(tokens):
        return min(len(tokens), len(announced)) // TOKEN_BYTES
    return shared_tokens(tokens, 0, announced)
