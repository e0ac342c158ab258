"""What a lookup has found: the store's answer, and how it gets into caches."""

import itertools
from dataclasses import dataclass

from cachestore.client import Client, Lease, MatchKind
from cachestore.record import paths
from engine import attach
from engine.attach import Attachment, Source
from engine.kv.codec import CodecPolicy


@dataclass(frozen=True, slots=True)
class Found:
    """The store's answer, under a lease that also tells others that the missing rows are being
    computed. Rows [0, rows) of the request's tokens are held; without any there is no attachment.
    """

    client: Client
    lease: Lease
    attachment: Attachment | None

    @property
    def kind(self) -> MatchKind:
        return self.lease.kind

    @property
    def rows(self) -> int:
        return self.lease.rows

    @property
    def parting(self) -> int:
        """Where others part from the request, and it takes one more checkpoint; 0 for nowhere."""
        return self.lease.parting


def plan(
    policy: CodecPolicy, client: Client, namespace: bytes, lease: Lease, tokens: bytes
) -> Attachment | None:
    """How what a lease holds of `tokens` (packed) gets into caches; None when that is nothing.
    RecordError as attach.plan."""
    sources = _sources(client, namespace, lease, tokens)
    if not sources:
        return None
    checkpoint = None
    if lease.checkpoint is not None:
        rows = range(lease.rows - 1, lease.rows)
        (path,) = paths(namespace, tokens, [rows])
        checkpoint = Source(client.record(lease.checkpoint), 0, 1, path)
    return attach.plan(policy, sources, checkpoint)


def _sources(client: Client, namespace: bytes, lease: Lease, tokens: bytes) -> list[Source]:
    """Where the rows of a lease lie, and what their records have to say of them."""
    spans = lease.spans
    places = itertools.accumulate((span.rows for span in spans), initial=0)
    rows = [
        range(place - span.first_row, place + span.rows)
        for place, span in zip(places, spans, strict=False)
    ]
    return [
        Source(client.record(span), span.first_row, span.rows, path)
        for span, path in zip(spans, paths(namespace, tokens, rows), strict=True)
    ]
