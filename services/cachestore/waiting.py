"""Calls that wait for something to change, in the order in which they came."""

import asyncio
import contextlib


class WaitingRoom:
    """Whoever waits goes on at the next `wake`, the first one first, and looks for itself."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, seconds: float) -> None:
        """Returns after a `wake`, or after `seconds`."""
        woken = asyncio.get_running_loop().create_future()
        self._waiting[woken] = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await woken
        finally:
            self._waiting.pop(woken, None)

    def wake(self) -> None:
        """Lets all go on, once the caller has returned to the event loop."""
        waiting, self._waiting = self._waiting, {}
        for woken in waiting:
            # One that has just been cancelled is still in the room.
            if not woken.done():
                woken.set_result(None)
