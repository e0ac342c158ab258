import asyncio
import time

from cachestore.waiting import WaitingRoom


def test_all_go_on_in_the_order_in_which_they_came() -> None:
    async def scenario() -> None:
        room, order = WaitingRoom(), list[int]()

        async def wait(number: int, times: int) -> None:
            for _ in range(times):
                await room.wait(60)
            order.append(number)

        tasks = [asyncio.create_task(wait(number, times=1 + number % 2)) for number in range(6)]
        await asyncio.sleep(0)
        assert len(room) == 6
        room.wake()
        room.wake()  # nobody is there
        await asyncio.sleep(0)
        assert (order, len(room)) == ([0, 2, 4], 3)
        room.wake()
        await asyncio.gather(*tasks)
        assert order == [0, 2, 4, 1, 3, 5]

    asyncio.run(scenario())


def test_nobody_stays_after_its_time_or_its_end() -> None:
    async def scenario() -> None:
        room = WaitingRoom()
        start = time.monotonic()
        await room.wait(0.02)
        assert 0.01 < time.monotonic() - start < 5
        ended = asyncio.create_task(room.wait(60))
        await asyncio.sleep(0)
        ended.cancel()
        room.wake()  # before the end has reached it
        assert isinstance((await asyncio.gather(ended, return_exceptions=True))[0], BaseException)
        assert len(room) == 0

    asyncio.run(scenario())
