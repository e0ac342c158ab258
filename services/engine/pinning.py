"""What a Warm with `pin` asks of the cachestore, as statuses of its call."""

import asyncio

import grpc

from cachestore.client import StoreRefused, StoreUnavailable
from engine.account import Context
from engine.prefix import Prefix
from engine.status import PrefixStatus
from engine.v1 import engine_pb2 as pb


async def require(status: PrefixStatus, context: Context) -> None:
    """Ends a call that could not pin: better now than after all the work."""
    if status.not_cached_reason:
        message = f"pin: this engine does not cache: {status.not_cached_reason}"
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
    if not (status.connected and status.namespace):
        missing = "its weights are not identified yet" if status.connected else "no cachestore"
        message = f"pin: this engine does not cache now ({missing}); try again"
        await context.abort(grpc.StatusCode.UNAVAILABLE, message)


async def keep(prefix: Prefix, tokens: tuple[int, ...], context: Context) -> pb.Pinned:
    """Pins a prompt that has just been stored; ends the call when not all of it was."""
    try:
        pinned = await asyncio.to_thread(prefix.pin, tokens)
    except StoreUnavailable as error:
        message = f"pin: the prompt is computed, but the cachestore is away: {error}"
        await context.abort(grpc.StatusCode.UNAVAILABLE, message)
    except StoreRefused as refusal:
        message = f"pin: {refusal.message}"
        if refusal.code is grpc.StatusCode.NOT_FOUND:
            message = (
                f"pin: the cachestore does not hold all of the prompt ({refusal.message}): it had "
                "no room, then raise its budget or unpin something; or it was restarted "
                "meanwhile, then try again"
            )
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
    return pb.Pinned(record_id=pinned.record_id, bytes=pinned.nbytes)
