"""The clock of the tests: it moves when told to, and wakes who has slept long enough."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.ports import Clock
from holdfast.testing import ManualClock


def test_both_faces_move_together() -> None:
    clock: Clock = ManualClock(now=1_000)
    assert (clock.now(), clock.monotonic()) == (1_000, 0.0)
    assert isinstance(clock, ManualClock)
    clock.advance(1.5)
    clock.pause(60)
    assert (clock.now(), clock.monotonic()) == (1_501_000, 1.5)


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="time does not go back"):
        ManualClock().advance(-1)


async def test_sleepers_are_woken_when_their_time_has_come() -> None:
    clock = ManualClock()
    short, long = asyncio.ensure_future(clock.sleep(1)), asyncio.ensure_future(clock.sleep(2))
    await clock.sleep(0)
    clock.advance(0.5)
    await clock.sleep(0)
    assert not short.done()
    clock.advance(0.5)
    await asyncio.wait_for(short, 10)
    assert not long.done()
    thread = threading.Thread(target=clock.advance, args=(5,))
    thread.start()
    await asyncio.wait_for(long, 10)
    thread.join()


async def test_a_cancelled_sleeper_does_no_harm() -> None:
    clock = ManualClock()
    sleeper = asyncio.ensure_future(clock.sleep(1))
    await clock.sleep(0)
    sleeper.cancel()
    await asyncio.wait([sleeper])
    clock.advance(2)
    await clock.sleep(0)
    assert sleeper.cancelled()
