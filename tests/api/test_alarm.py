"""One timer for many deadlines: what is lifted never rings, what is late raises as asyncio's own timeout does."""

from __future__ import annotations

import asyncio
import time

import pytest

from tenuto_server.api.alarm import Alarm


def test_deadlines_ring_in_order_once_and_only_if_not_lifted() -> None:
    rung: list[str] = []

    async def scene() -> None:
        alarm = Alarm(asyncio.get_running_loop())
        for name, in_s in (("late", 0.12), ("early", 0.04), ("lifted", 0.02), ("moved", 0.01)):
            alarm.set(name, in_s, lambda name=name: rung.append(name))
        alarm.lift("lifted")
        alarm.set("moved", 0.08, lambda: rung.append("moved"))
        alarm.lift("never set")
        await asyncio.sleep(0.3)
        alarm.set("again", 0.01, lambda: rung.append("again"))
        await asyncio.sleep(0.1)

    asyncio.run(scene())
    assert rung == ["early", "moved", "late", "again"]


def test_within_gives_the_result_the_error_or_the_timeout() -> None:
    async def fail() -> None:
        raise ValueError("its own")

    async def soon() -> str:
        await asyncio.sleep(0)
        return "here"

    async def scene() -> None:
        alarm = Alarm(asyncio.get_running_loop())
        assert await alarm.within(5, soon()) == "here"
        with pytest.raises(ValueError, match="its own"):
            await alarm.within(5, fail())
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await alarm.within(0.05, asyncio.sleep(10))
        assert 0.04 < time.monotonic() - began < 5
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling(), "what a deadline cancelled goes on as if nothing had been"
        await asyncio.sleep(0)

    asyncio.run(scene())


def test_a_task_that_is_cancelled_from_outside_stays_cancelled() -> None:
    async def scene() -> None:
        alarm = Alarm(asyncio.get_running_loop())
        task = asyncio.create_task(alarm.within(5, asyncio.sleep(10)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())


def test_many_deadlines_need_one_timer() -> None:
    async def scene() -> int:
        loop = asyncio.get_running_loop()
        alarm, made = Alarm(loop), 0
        call_at = loop.call_at

        def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal made
            made += 1
            return call_at(*args, **kwargs)

        loop.call_at = counted  # type: ignore[method-assign]
        for _ in range(1000):
            alarm.set("key", 5, lambda: None)
            alarm.lift("key")
        return made

    assert asyncio.run(scene()) == 1
