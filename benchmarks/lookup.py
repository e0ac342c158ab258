"""How long a lookup takes, beside a bare gRPC round trip of the same size.

    python -m benchmarks.lookup [--sequences 10000] [--longest 50000] [--calls 2000]

A cachestore of its own holds the sequences, a third of which go on where another one has been
left. "bare" is a gRPC server that parses the same request and answers with the same response,
without looking at it. Both are asked in turn, by one client.
"""

import asyncio
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tests.support.daemons import short_directory, start_cachestore
from tests.support.waiting import until

from benchmarks.measure import Columns, flags, median, progress, publish, seconds
from cachestore import endpoint
from cachestore.client import Client
from cachestore.v1 import cachestore_pb2 as pb
from cachestore.v1 import cachestore_pb2_grpc

NAMESPACE = bytes(32)
SHORTEST = 100
# The longest write that takes one reservation.
ROWS_PER_WRITE = 1 << 16


@dataclass(frozen=True, slots=True)
class Measured:
    case: str
    tokens: int
    spans: int
    bare_seconds_p50: float
    bare_seconds_p99: float
    lookup_seconds_p50: float
    lookup_seconds_p99: float
    lookup_seconds_max: float
    release_seconds_p50: float


COLUMNS: Columns = {
    "request": lambda row: row.case,
    "tokens": lambda row: str(row.tokens),
    "spans": lambda row: str(row.spans),
    "bare p50": lambda row: seconds(row.bare_seconds_p50),
    "lookup p50": lambda row: seconds(row.lookup_seconds_p50),
    "of bare": lambda row: f"{row.lookup_seconds_p50 / row.bare_seconds_p50:.2f}",
    "bare p99": lambda row: seconds(row.bare_seconds_p99),
    "p99": lambda row: seconds(row.lookup_seconds_p99),
    "max": lambda row: seconds(row.lookup_seconds_max),
    "release p50": lambda row: seconds(row.release_seconds_p50),
}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--longest", type=int, default=50_000, help="tokens")
    parser.add_argument("--calls", type=int, default=2_000)
    options = parser.parse_args()
    if options.small:
        options.sequences, options.longest, options.calls = 100, 2_000, 20
    with (
        short_directory() as directory,
        start_cachestore(directory, budget="1GiB") as daemon,
        daemon.client() as client,
    ):
        longest = fill(client, options.sequences, options.longest)
        held = daemon.stats()
        rows = [
            measure(directory, client, case, tokens, options.calls)
            for case, tokens in requests(longest)
        ]
    title = f"{held.sequences} sequences of {held.tokens} tokens in {held.records} records"
    publish(options, title, COLUMNS, rows)


def fill(client: Client, count: int, longest: int) -> np.ndarray[Any, Any]:
    """Store sequences of random tokens, the longest one last; return that."""
    chance = random.Random(0)
    kept: list[np.ndarray[Any, Any]] = []
    for index in range(count):
        length = int(SHORTEST * (longest / SHORTEST) ** (chance.random() ** 2))
        if index == count - 1:
            length = longest
        tokens = random_tokens(index, length)
        if kept and index % 3 == 0:
            before = chance.choice(kept)
            shared = chance.randrange(min(len(before), length))
            tokens[:shared] = before[:shared]
        write(client, tokens)
        kept.append(tokens)
        if index % 1000 == 0:
            progress(f"{index} of {count} sequences stored")
    return kept[-1]


def write(client: Client, tokens: np.ndarray[Any, Any]) -> None:
    """The records are never read, and so are not written either."""
    for end in [*range(ROWS_PER_WRITE, len(tokens), ROWS_PER_WRITE), len(tokens)]:
        reservation = client.reserve(NAMESPACE, tokens[:end].tobytes(), 0, 1, 1, "benchmark")
        client.commit(reservation.id, [1 + piece.rows for piece in reservation.pieces])


def requests(stored: np.ndarray[Any, Any]) -> Iterator[tuple[str, bytes]]:
    """Cases, with their tokens."""
    half = stored.copy()
    half[len(half) // 2 :] = random_tokens(-1, len(half) - len(half) // 2)
    yield "hit", stored.tobytes()
    yield "hit, first half", half.tobytes()
    yield "miss", random_tokens(-2, len(stored)).tobytes()
    yield "hit, short", stored[:SHORTEST].tobytes()


def measure(directory: Path, client: Client, case: str, tokens: bytes, calls: int) -> Measured:
    progress(f"{case}: {calls} calls")
    limit = len(tokens) // 4 - 1
    lookups, releases, bares = [], [], []
    request = pb.LookupRequest(namespace=NAMESPACE, tokens=tokens, limit=limit)
    lease = client.lookup(NAMESPACE, tokens, limit)
    with bare(directory / "bare.sock", answer(len(lease.spans))) as call:
        for _ in range(calls):
            bares.append(timed(lambda: call(request)))
            start = time.perf_counter()
            lease = client.lookup(NAMESPACE, tokens, limit)
            lookups.append(time.perf_counter() - start)
            releases.append(timed(partial(client.release, [lease.id] if lease.id else [])))
    bares.sort()
    lookups.sort()
    return Measured(
        case=case,
        tokens=len(tokens) // 4,
        spans=len(lease.spans),
        bare_seconds_p50=median(bares),
        bare_seconds_p99=bares[int(0.99 * calls)],
        lookup_seconds_p50=median(lookups),
        lookup_seconds_p99=lookups[int(0.99 * calls)],
        lookup_seconds_max=lookups[-1],
        release_seconds_p50=median(releases),
    )


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def answer(spans: int) -> bytes:
    """As large as the store's."""
    columns = pb.Spans(
        record_ids=range(50_000, 50_000 + spans),
        slab_ids=[3] * spans,
        offsets=[1 << 25] * spans,
        lengths=[512] * spans,
        generations=range(50_000, 50_000 + spans),
        record_bytes=[257] * spans,
        first_rows=[0] * spans,
        rows=[256] * spans,
    )
    return pb.LookupResponse(kind=pb.MATCH_KIND_EXACT, spans=columns).SerializeToString()


@contextmanager
def bare(path: Path, response: bytes) -> Iterator[Callable[[pb.LookupRequest], object]]:
    """A call of the bare server, which lives as long as the context."""
    process = multiprocessing.get_context("spawn").Process(
        target=serve_bare, args=(path, response), daemon=True
    )
    process.start()
    try:
        until(path.exists, "the bare server's socket", seconds=30)
        with grpc.insecure_channel(endpoint.grpc_target(path)) as channel:
            stub = cachestore_pb2_grpc.CachestoreStub(channel)
            yield lambda request: stub.Lookup(request, wait_for_ready=True)
    finally:
        process.kill()
        process.join()
        path.unlink(missing_ok=True)


def serve_bare(path: Path, response: bytes) -> None:
    asyncio.run(_serve_bare(path, pb.LookupResponse.FromString(response)))


async def _serve_bare(path: Path, response: pb.LookupResponse) -> None:
    async def lookup(_request: pb.LookupRequest, _context: Any) -> pb.LookupResponse:
        return response

    handler = grpc.unary_unary_rpc_method_handler(
        lookup,
        request_deserializer=pb.LookupRequest.FromString,
        response_serializer=pb.LookupResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                pb.DESCRIPTOR.services_by_name["Cachestore"].full_name, {"Lookup": handler}
            ),
        )
    )
    server.add_insecure_port(endpoint.grpc_target(path))
    await server.start()
    await server.wait_for_termination()


def random_tokens(seed: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed + 10).integers(0, 1 << 17, count, dtype=np.uint32)


if __name__ == "__main__":
    main()
