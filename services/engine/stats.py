"""Everything that the engine counts, as the message of the proto."""

import os
from collections.abc import Mapping
from typing import Any

from cachestore.client import MatchKind
from cachestore.histogram import Histogram
from engine import __version__
from engine.account import Outcome
from engine.status import PrefixStatus, Transfers
from engine.v1 import engine_pb2 as pb
from engine.worker import Snapshot


def response(
    snapshot: Snapshot,
    prefix: PrefixStatus,
    outcomes: Mapping[Outcome, int],
    uptime_seconds: float,
) -> pb.StatsResponse:
    occupancy, counters = snapshot.occupancy, snapshot.counters
    return pb.StatsResponse(
        version=__version__,
        pid=os.getpid(),
        uptime_seconds=uptime_seconds,
        queued=occupancy.queued,
        prefilling=occupancy.prefilling,
        decoding=occupancy.decoding,
        finished=counters.finished,
        cancelled=counters.cancelled,
        failed=counters.failed,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        prefilled_tokens=counters.prefilled_tokens,
        completion_tokens=counters.completion_tokens,
        cachestore_connected=prefix.connected,
        writes_committed=prefix.writes_committed,
        writes_dropped=prefix.writes_dropped,
        mlx_active_bytes=snapshot.active_bytes,
        mlx_peak_bytes=snapshot.peak_bytes,
        mlx_cache_bytes=snapshot.cache_bytes,
        outcomes=pb.Outcomes(**{outcome.value: count for outcome, count in outcomes.items()}),
        matches=_by_match(counters.matches),
        matched_tokens=_by_match(counters.matched_tokens),
        attached=_transfers(prefix.attached),
        stored=_transfers(prefix.stored),
        queue_seconds=_histogram(counters.queue_seconds),
        first_token_seconds=_histogram(counters.first_token_seconds),
        next_token_seconds=_histogram(counters.next_token_seconds),
        batch_requests=_histogram(counters.batch_requests),
    )


def _by_match(counts: Mapping[MatchKind | None, int]) -> pb.MatchCounts:
    fields: dict[str, Any] = {
        "unavailable" if kind is None else kind.name.lower(): count
        for kind, count in counts.items()
    }
    return pb.MatchCounts(**fields)


def _transfers(done: Transfers) -> pb.Transfers:
    return pb.Transfers(bytes=done.bytes, seconds=done.seconds)


def _histogram(counted: Histogram) -> pb.Histogram:
    return pb.Histogram(bounds=counted.bounds, counts=counted.counts, sum=counted.sum)
