import itertools

import pytest

from cachestore.lease import Claims, random_id
from tests.support.whole import whole


def counted() -> Claims[str]:
    return Claims(seconds=30.0, new_id=itertools.count(1).__next__)


def test_a_claim_is_held_until_its_deadline() -> None:
    claims = counted()
    claim_id = claims.open(1, "rows", now=0.0)
    assert claims.lapse(29.9) == []
    assert claims.get(1, claim_id) == "rows"
    assert claims.lapse(30.0) == [(1, claim_id, "rows")]
    assert claims.get(1, claim_id) is None
    assert len(claims) == claims.count(1) == 0
    whole(claims.checks())


def test_renewing_moves_the_deadline_and_the_order() -> None:
    claims = counted()
    first, second = claims.open(1, "a", now=0.0), claims.open(1, "b", now=10.0)
    assert claims.renew(1, first, now=20.0)
    whole(claims.checks())
    assert claims.lapse(49.9) == [(1, second, "b")]
    assert claims.lapse(50.0) == [(1, first, "a")]


def test_a_lapsed_claim_cannot_be_renewed_or_closed() -> None:
    claims = counted()
    claim_id = claims.open(1, "rows", now=0.0)
    claims.lapse(30.0)
    assert not claims.renew(1, claim_id, now=30.0)
    assert claims.close(1, claim_id) is None


def test_a_session_sees_only_its_own_claims() -> None:
    claims = counted()
    claim_id = claims.open(1, "rows", now=0.0)
    assert claims.get(2, claim_id) is None
    assert not claims.renew(2, claim_id, now=0.0)
    assert claims.close(2, claim_id) is None
    assert claims.close_session(2) == []
    assert claims.close(1, claim_id) == "rows"


def test_closing_a_session_ends_its_claims_and_no_others() -> None:
    claims = counted()
    claims.open(1, "a", now=0.0)
    other = claims.open(2, "b", now=0.0)
    claims.open(1, "c", now=0.0)
    assert sorted(claims.close_session(1)) == ["a", "c"]
    whole(claims.checks())
    assert claims.held() == ["b"]
    assert (claims.count(1), claims.count(2)) == (0, 1)
    assert claims.get(2, other) == "b"


def test_an_id_in_use_is_not_given_again() -> None:
    ids = iter([5, 5, 5, 6])
    claims: Claims[str] = Claims(seconds=30.0, new_id=ids.__next__)
    assert [claims.open(1, "a", now=0.0), claims.open(1, "b", now=0.0)] == [5, 6]


def test_random_ids_fit_a_signed_integer_and_are_never_zero() -> None:
    ids = {random_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(0 < claim_id < 2**63 for claim_id in ids)


def test_check_notices_deadlines_out_of_order() -> None:
    claims = counted()
    claims.open(1, "a", now=10.0)
    claims.open(1, "b", now=0.0)
    with pytest.raises(AssertionError):
        whole(claims.checks())
