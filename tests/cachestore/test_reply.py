"""Answers that cannot be true are told from those that can."""

from collections.abc import Callable, MutableSequence

import pytest

from cachestore import reply
from cachestore.extent import Extent
from cachestore.reply import Contradiction, MatchKind
from cachestore.v1 import cachestore_pb2 as pb


def match() -> pb.LookupResponse:
    """Five rows in two spans."""
    return pb.LookupResponse(
        kind=pb.MATCH_KIND_PREFIX,
        rows=5,
        spans=pb.Spans(
            record_ids=[7, 8],
            slab_ids=[1, 1],
            offsets=[256, 768],
            lengths=[512, 512],
            generations=[3, 4],
            record_bytes=[500, 512],
            first_rows=[0, 1],
            rows=[2, 3],
        ),
        lease_id=9,
        lease_seconds=30,
    )


def replace(column: MutableSequence[int], value: int) -> None:
    column[0] = value


def asked(limit: int = 5, checkpointed: bool = False) -> pb.LookupRequest:
    return pb.LookupRequest(limit=limit, checkpointed=checkpointed)


def request() -> pb.ReserveRequest:
    return pb.ReserveRequest(
        namespace=bytes(32), tokens=bytes(40), first_row=1, record_overhead_bytes=50, row_bytes=10
    )


def room() -> pb.ReserveResponse:
    """Rows 2 to 9 in two pieces."""
    extents = [pb.Extent(slab_id=1, offset=256 * n, length=256, generation=n) for n in (1, 2)]
    return pb.ReserveResponse(
        reservation_id=4,
        have=2,
        pieces=[
            pb.Piece(extent=extents[0], first_token=2, rows=5),
            pb.Piece(extent=extents[1], first_token=7, rows=3),
        ],
        reservation_seconds=30,
    )


def test_a_match_is_handed_on() -> None:
    lease = reply.lease(match(), asked())
    assert (lease.id, lease.kind, lease.rows, lease.seconds) == (9, MatchKind.PREFIX, 5, 30.0)
    assert [(span.record_id, span.first_row, span.rows) for span in lease.spans] == [
        (7, 0, 2),
        (8, 1, 3),
    ]


def test_a_miss_has_nothing_to_release() -> None:
    lease = reply.lease(pb.LookupResponse(kind=pb.MATCH_KIND_MISS), asked())
    assert lease == reply.Lease(0, MatchKind.MISS, 0, (), 0.0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: setattr(m, "kind", pb.MATCH_KIND_UNSPECIFIED),
        lambda m: setattr(m, "kind", 99),
        lambda m: setattr(m, "kind", pb.MATCH_KIND_MISS),
        lambda m: setattr(m, "rows", 4),
        lambda m: replace(m.spans.rows, 3),
        lambda m: replace(m.spans.rows, 0),
        lambda m: m.spans.rows.pop(),
        lambda m: m.spans.generations.append(5),
        lambda m: m.ClearField("spans"),
        lambda m: replace(m.spans.offsets, 255),
        lambda m: replace(m.spans.lengths, 511),
        lambda m: replace(m.spans.lengths, 0),
        lambda m: replace(m.spans.record_bytes, 513),
        lambda m: replace(m.spans.record_bytes, 0),
        lambda m: setattr(m, "lease_id", 0),
        lambda m: setattr(m, "lease_seconds", 0),
        lambda m: setattr(m, "lease_seconds", float("nan")),
        lambda m: setattr(m, "lease_seconds", float("inf")),
    ],
)
def test_a_match_that_cannot_be_is_refused(spoil: Callable[[pb.LookupResponse], object]) -> None:
    answer = match()
    spoil(answer)
    with pytest.raises(Contradiction):
        reply.lease(answer, asked())


def test_more_rows_than_asked_for_are_refused() -> None:
    with pytest.raises(Contradiction, match="over 4"):
        reply.lease(match(), asked(limit=4))


def test_a_reservation_is_handed_on() -> None:
    found = reply.reservation(room(), request())
    assert (found.id, found.have, found.seconds) == (4, 2, 30.0)
    assert [(piece.first_token, piece.rows) for piece in found.pieces] == [(2, 5), (7, 3)]
    assert found.end == 10


def test_a_reservation_may_end_before_the_sequence() -> None:
    answer = room()
    answer.pieces.pop()
    assert reply.reservation(answer, request()).end == 7


def test_everything_may_be_held_already() -> None:
    answer = pb.ReserveResponse(reservation_id=4, have=10, reservation_seconds=30)
    assert reply.reservation(answer, request()).pieces == ()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: setattr(r, "have", 0),
        lambda r: setattr(r, "have", 3),
        lambda r: setattr(r, "have", 11),
        lambda r: r.pieces.add(),
        lambda r: r.ClearField("pieces"),
        lambda r: setattr(r.pieces[0], "rows", 4),
        lambda r: setattr(r.pieces[1], "first_token", 6),
        lambda r: setattr(r.pieces[1], "rows", 4),
        lambda r: setattr(r.pieces[0].extent, "length", 0),
        lambda r: setattr(r.pieces[0].extent, "offset", 300),
        lambda r: setattr(r.pieces[1].extent, "offset", 256),
        lambda r: setattr(r, "reservation_id", 0),
        lambda r: setattr(r, "reservation_seconds", -1),
    ],
)
def test_a_reservation_that_cannot_be_is_refused(
    spoil: Callable[[pb.ReserveResponse], object],
) -> None:
    answer = room()
    spoil(answer)
    with pytest.raises(Contradiction):
        reply.reservation(answer, request())


def test_pieces_must_have_room_for_their_rows() -> None:
    tight = request()
    tight.row_bytes = 42  # 50 + 5 * 42 > 256
    with pytest.raises(Contradiction, match="256 bytes for 5 rows"):
        reply.reservation(room(), tight)


def test_pieces_of_different_slabs_may_have_the_same_offset() -> None:
    answer = room()
    answer.pieces[1].extent.offset = 256
    answer.pieces[1].extent.slab_id = 2
    assert len(reply.reservation(answer, request()).pieces) == 2


def match_with_state() -> pb.LookupResponse:
    answer = match()
    extent = pb.Extent(slab_id=2, offset=512, length=1024, generation=7)
    answer.checkpoint.CopyFrom(
        pb.Checkpoint(checkpoint_id=11, extent=extent, record_bytes=1000, position=5)
    )
    return answer


def test_a_match_with_its_checkpoint_is_handed_on() -> None:
    lease = reply.lease(match_with_state(), asked(checkpointed=True))
    extent = Extent(slab_id=2, offset=512, length=1024, generation=7)
    assert lease.checkpoint == reply.Checkpoint(11, 5, extent, 1000)
    miss = reply.lease(pb.LookupResponse(kind=pb.MATCH_KIND_MISS), asked(checkpointed=True))
    assert miss.checkpoint is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m.ClearField("checkpoint"),
        lambda m: setattr(m.checkpoint, "position", 4),
        lambda m: setattr(m.checkpoint, "record_bytes", 0),
        lambda m: setattr(m.checkpoint, "record_bytes", 1025),
        lambda m: setattr(m.checkpoint.extent, "offset", 500),
        lambda m: setattr(m.checkpoint.extent, "length", 0),
        lambda m: m.checkpoint.ClearField("extent"),
        lambda m: [m.ClearField(name) for name in ("spans", "rows")],
    ],
)
def test_a_checkpoint_that_cannot_be_is_refused(
    spoil: Callable[[pb.LookupResponse], object],
) -> None:
    answer = match_with_state()
    spoil(answer)
    with pytest.raises(Contradiction):
        reply.lease(answer, asked(checkpointed=True))


def test_rows_come_with_a_checkpoint_exactly_when_they_need_one() -> None:
    with pytest.raises(Contradiction, match="checkpoint"):
        reply.lease(match_with_state(), asked())
    with pytest.raises(Contradiction, match="checkpoint"):
        reply.lease(match(), asked(checkpointed=True))


def test_a_parting_is_handed_on() -> None:
    answer = match()
    answer.parting = 9
    asked_for = pb.LookupRequest(limit=9, parting_distance=4)
    assert reply.lease(answer, asked_for).parting == 9
    for wrong, request in (
        (8, asked_for),  # too close behind the rows that are served
        (10, asked_for),  # over the limit
        (9, pb.LookupRequest(limit=9)),  # nobody has asked
    ):
        answer.parting = wrong
        with pytest.raises(Contradiction, match="parting"):
            reply.lease(answer, request)
    promise = pb.LookupResponse(kind=pb.MATCH_KIND_MISS, parting=9)
    with pytest.raises(Contradiction, match="parting"):
        reply.lease(promise, asked_for)


def request_for_states() -> pb.ReserveRequest:
    asked = request()
    asked.checkpointed = True
    for position in (2, 6, 10):
        asked.checkpoints.add(position=position, bytes=300)
    return asked


def room_for_states() -> pb.ReserveResponse:
    """For rows 2 to 9, and for two of the checkpoints."""
    answer = room()
    for position, offset in ((6, 1024), (10, 2048)):
        extent = pb.Extent(slab_id=1, offset=offset, length=512, generation=offset)
        answer.checkpoints.add(position=position, extent=extent)
    return answer


def test_room_for_checkpoints_is_handed_on() -> None:
    found = reply.reservation(room_for_states(), request_for_states())
    assert [(staged.position, staged.extent.offset) for staged in found.checkpoints] == [
        (6, 1024),
        (10, 2048),
    ]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: setattr(r.checkpoints[0], "position", 5),
        lambda r: setattr(r.checkpoints[0], "position", 10),
        lambda r: setattr(r.checkpoints[1], "position", 2),
        lambda r: setattr(r.checkpoints[0].extent, "length", 256),
        lambda r: setattr(r.checkpoints[0].extent, "offset", 1000),
        lambda r: setattr(r.checkpoints[0].extent, "offset", 256),
        lambda r: setattr(r.checkpoints[0].extent, "offset", 2048),
        lambda r: r.checkpoints[0].ClearField("extent"),
        lambda r: r.pieces.pop(),  # the one at 10 would be behind the last row
    ],
)
def test_room_for_checkpoints_that_cannot_be_is_refused(
    spoil: Callable[[pb.ReserveResponse], object],
) -> None:
    answer = room_for_states()
    spoil(answer)
    with pytest.raises(Contradiction):
        reply.reservation(answer, request_for_states())


@pytest.mark.parametrize(("pid", "budget"), [(0, 1 << 30), (7, 0), (7, (16 << 20) - 1)])
def test_a_daemon_that_cannot_be_is_not_shown(pid: int, budget: int) -> None:
    with pytest.raises(Contradiction):
        reply.stats(pb.StatsResponse(pid=pid, bytes_budget=budget))
    assert reply.stats(pb.StatsResponse(pid=7, bytes_budget=1 << 30)).pid == 7
