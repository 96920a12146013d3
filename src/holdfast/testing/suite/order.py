"""Which job comes next, and when: order within a lane, lanes, due times, pauses."""

# ruff: noqa: S101

from __future__ import annotations

from collections import Counter

from holdfast.lanes import INVERTED_EVERY
from holdfast.lifecycle import Applied
from holdfast.store import ClaimRequest
from holdfast.testing.suite.harness import QUEUE, Rig

INVERTED = INVERTED_EVERY - 1


# Within a lane.


async def test_a_lane_is_served_first_in_first_out(rig: Rig) -> None:
    """Jobs of one lane come in the order of their inserts, over several inserts and several claims."""
    ids = await rig.add_many(3) + [await rig.add() for _ in range(3)]
    session = await rig.session()
    assert await rig.claim_ids(session, 4) + await rig.claim_ids(session, 4) == ids


async def test_a_lane_is_in_order_for_two_clients_too(rig: Rig) -> None:
    """The order is the store's, whoever inserts and whoever claims."""
    async with rig.harness.second() as store:
        other = rig.using(store)
        ids = [await (rig if turn % 2 else other).add() for turn in range(6)]
        session = await rig.session()
        assert await other.claim_ids(session, 3) + await rig.claim_ids(session, 3) == ids


async def test_an_older_id_does_not_overtake(rig: Rig) -> None:
    """The store's time of the insert decides, not the clock of the machine that made the id."""
    ids = sorted((rig.new().id for _ in range(4)), reverse=True)
    for job_id in ids:
        await rig.add(id=job_id)
        await rig.wait(0.1)
    assert await rig.claim_ids(await rig.session()) == ids


async def test_a_delayed_job_is_not_claimable_before_it_is_due(rig: Rig) -> None:
    """Neither `delay` nor `run_at` is ever early."""
    by_delay = await rig.add(delay=rig.steps(2))
    by_time = await rig.add(run_at=await rig.store.now() + rig.steps(2))
    session = await rig.session()
    assert await rig.claim_ids(session) == []
    await rig.wait(1)
    assert await rig.claim_ids(session) == []
    await rig.wait(1)
    assert await rig.claim_ids(session) == [by_delay, by_time]


async def test_a_job_is_claimed_at_or_after_its_due_time(rig: Rig) -> None:
    """The store's time at the claim is never before `run_at`."""
    await rig.add_many(3, delay=rig.steps(0.5))
    await rig.wait(0.5)
    claimed = await rig.store.claim(ClaimRequest(session_id=await rig.session(), queues=(QUEUE,), limit=9))
    assert len(claimed.jobs) == 3
    assert all(job.run_at <= claimed.now for job in claimed.jobs)
    assert all(job.claimed_at == claimed.now for job in claimed.jobs)


async def test_jobs_are_ordered_by_their_due_time(rig: Rig) -> None:
    """A delayed job takes its place among the others by when it is due, not by when it was inserted."""
    late = await rig.add(delay=rig.steps(3))
    early = await rig.add(delay=rig.steps(1))
    first = await rig.add()
    await rig.wait(2)
    between = await rig.add()
    await rig.wait(2)
    last = await rig.add()
    assert await rig.claim_ids(await rig.session()) == [first, early, between, late, last]


async def test_a_time_in_the_past_is_not_ahead_of_the_queue(rig: Rig) -> None:
    """`run_at` in the past means now: it is no way to overtake."""
    first = await rig.add()
    pushy = await rig.add(run_at=0)
    third = await rig.add(run_at=(await rig.store.now()) - rig.steps(5))
    job = await rig.get(pushy)
    assert job.run_at == job.created_at
    assert await rig.claim_ids(await rig.session()) == [first, pushy, third]


async def test_jobs_due_at_the_same_moment_are_served_by_id(rig: Rig) -> None:
    """Ids are made in the order of time, so that is the order of their making."""
    due = await rig.store.now() + rig.steps(1)
    ids = [await rig.add(run_at=due) for _ in range(5)]
    await rig.wait(1.1)
    assert await rig.claim_ids(await rig.session()) == ids


# Lanes.


async def test_lower_priorities_go_first(rig: Rig) -> None:
    """A lower number is served before a higher one, negative ones included."""
    ids = {priority: await rig.add(priority=priority) for priority in (5, 100, 0, -100, 10, -1)}
    assert await rig.claim_ids(await rig.session()) == [ids[priority] for priority in sorted(ids)]


async def test_an_urgent_job_that_is_not_due_does_not_hold_up_others(rig: Rig) -> None:
    """A scheduled job of a better priority is passed by until it is due."""
    urgent = await rig.add(priority=0, delay=rig.steps(1))
    plain = await rig.add_many(2, priority=9)
    session = await rig.session()
    assert await rig.claim_ids(session, 1) == plain[:1]
    await rig.wait(1)
    assert await rig.claim_ids(session, 1) == [urgent]
    assert await rig.claim_ids(session, 1) == plain[1:]


async def test_every_sixteenth_turn_serves_the_lowest_lane_first(rig: Rig) -> None:
    """Ageing: turn 15 (and 31, …) goes through the priorities backwards, so the last lane never starves."""
    session = await rig.session()
    for turn in (INVERTED, INVERTED + INVERTED_EVERY):
        high, low = await rig.add(priority=0), await rig.add(priority=10)
        assert await rig.claim_ids(session, 1, turn=turn) == [low]
        assert await rig.claim_ids(session, 1, turn=turn) == [high]
    for turn in (0, INVERTED - 1, INVERTED + 1):
        high, low = await rig.add(priority=0), await rig.add(priority=10)
        assert await rig.claim_ids(session, 2, turn=turn) == [high, low]


async def test_inverted_turns_let_no_priority_starve(rig: Rig) -> None:
    """Turns 15 and 31 begin with another priority each: those in the middle have their turn too."""
    for priority in (0, 5, 10):
        await rig.add_many(3, priority=priority)
    session = await rig.session()
    turns = [INVERTED + lap * INVERTED_EVERY for lap in range(2)]
    served = [(await rig.claim(session, 1, turn=turn))[0].priority for turn in turns]
    assert served == [10, 5]


async def test_only_lanes_with_due_jobs_take_part(rig: Rig) -> None:
    """A share whose jobs are all scheduled or cancelled has no turn and no part."""
    for share in ("a", "b"):
        await rig.add_many(5, share=share)
    await rig.add_many(5, share="c", delay=rig.steps(5))
    await rig.store.request_cancel(await rig.add_many(5, share="d"))
    session = await rig.session()
    assert [job.share for job in await rig.claim(session, 3)] == ["a", "a", "b"]
    assert [(await rig.claim(session, 1, turn=turn))[0].share for turn in (2, 3)] == ["a", "b"]


async def test_an_inverted_turn_keeps_the_order_within_lanes(rig: Rig) -> None:
    """Only the lanes change places."""
    low, high = await rig.add_many(3, priority=10), await rig.add_many(3, priority=0)
    assert await rig.claim_ids(await rig.session(), 5, turn=INVERTED) == low + high[:2]


async def test_shares_divide_a_claim_evenly(rig: Rig) -> None:
    """One customer with many jobs does not push back another with few."""
    await rig.add_many(20, share="big")
    await rig.add_many(2, share="small")
    await rig.add_many(5, share="")
    jobs = await rig.claim(await rig.session(), 9)
    assert Counter(job.share for job in jobs) == {"": 4, "big": 3, "small": 2}


async def test_what_one_share_leaves_goes_to_the_others(rig: Rig) -> None:
    """A claim is filled as long as any lane of the priority has jobs, also when one gives exactly its part."""
    await rig.add_many(2, share="a")
    await rig.add_many(1, share="b")
    await rig.add_many(7, share="c")
    session = await rig.session()
    assert Counter(job.share for job in await rig.claim(session, 8)) == {"a": 2, "b": 1, "c": 5}
    assert Counter(job.share for job in await rig.claim(session, 8)) == {"c": 2}


async def test_a_lane_that_gives_exactly_its_part_is_asked_again(rig: Rig) -> None:
    """Two lanes, one emptied exactly by its part, the other with less: the claim ends without an error."""
    await rig.add_many(2, share="a")
    await rig.add_many(1, share="b")
    jobs = await rig.claim(await rig.session(), 4)
    assert Counter(job.share for job in jobs) == {"a": 2, "b": 1}


async def test_shares_take_turns(rig: Rig) -> None:
    """With one slot at a time every share is served in turn."""
    for share in ("a", "b", "c"):
        await rig.add_many(2, share=share)
    session = await rig.session()
    served = [(await rig.claim(session, 1, turn=turn))[0].share for turn in range(3)]
    assert sorted(served) == ["a", "b", "c"]


async def test_shares_do_not_mix_priorities(rig: Rig) -> None:
    """Every job of a better priority comes first, whatever its share."""
    low = await rig.add_many(2, share="a", priority=9)
    high = await rig.add_many(2, share="b", priority=1)
    assert await rig.claim_ids(await rig.session(), 3) == [*high, low[0]]


# Queues, limits, pauses.


async def test_queues_are_served_as_they_are_listed(rig: Rig) -> None:
    """The first queue named goes first, whatever the priorities in the second; others are left alone."""
    b = await rig.add_many(2, queue="b", priority=-100)
    a = await rig.add_many(2, queue="a")
    c = await rig.add(queue="c")
    session = await rig.session()
    assert await rig.claim_ids(session, 3, queues=["a", "b"]) == [*a, b[0]]
    assert await rig.claim_ids(session, 3, queues=["c", "b"]) == [c, b[1]]


async def test_a_claim_never_gives_more_than_its_limit(rig: Rig) -> None:
    """Over all lanes and queues together."""
    for queue in ("a", "b"):
        for priority in (1, 2):
            for share in ("x", "y"):
                await rig.add_many(2, queue=queue, priority=priority, share=share)
    session = await rig.session()
    sizes = [len(await rig.claim(session, 5, queues=["a", "b"])) for _ in range(5)]
    assert sizes == [5, 5, 5, 1, 0]


async def test_a_job_in_flight_is_invisible_to_others(rig: Rig) -> None:
    """Nobody else can claim it, neither another session nor another client."""
    await rig.add()
    holder, rival = await rig.session(), await rig.session()
    assert len(await rig.claim(holder)) == 1
    assert await rig.claim(rival) == []
    assert await rig.claim(holder) == []
    async with rig.harness.second() as store:
        assert await rig.using(store).claim(rival) == []


async def test_a_paused_queue_yields_nothing(rig: Rig) -> None:
    """Claims pass it by, inserts go on, what is in flight can be settled; resumed, it goes on where it was."""
    first, second = await rig.add_many(2)
    session = await rig.session()
    job = await rig.take(session)
    await rig.store.set_paused(QUEUE, True)
    await rig.store.set_paused(QUEUE, True)
    third = await rig.add()
    other = await rig.add(queue="other")
    assert await rig.claim_ids(session, queues=[QUEUE, "other"]) == [other]
    assert await rig.ack(job) is Applied.APPLIED
    assert job.id == first
    await rig.store.set_paused(QUEUE, False)
    assert await rig.claim_ids(session) == [second, third]


async def test_a_queue_can_be_paused_before_it_has_jobs(rig: Rig) -> None:
    """A pause is a matter of the queue's name."""
    await rig.store.set_paused("later", True)
    await rig.add(queue="later")
    assert await rig.claim_ids(await rig.session(), queues=["later"]) == []


# When to come again.


async def test_next_due_says_when_to_come_again(rig: Rig) -> None:
    """The earliest due time among the queues asked for, over all lanes."""
    session = await rig.session()
    assert await rig.next_due(session) is None
    late = await rig.add(delay=rig.steps(9), priority=0)
    soon = await rig.add(delay=rig.steps(4), priority=9, share="s")
    await rig.add(delay=rig.steps(1), queue="other")
    assert await rig.next_due(session) == (await rig.get(soon)).run_at
    await rig.store.request_cancel([soon])
    assert await rig.next_due(session) == (await rig.get(late)).run_at
    await rig.store.request_cancel([late])
    assert await rig.next_due(session) is None


async def test_next_due_is_not_in_the_future_while_due_jobs_are_left(rig: Rig) -> None:
    """After a claim that was cut by its limit there is no reason to wait."""
    await rig.add_many(3)
    session = await rig.session()
    claimed = await rig.store.claim(ClaimRequest(session_id=session, queues=(QUEUE,), limit=2))
    assert claimed.due_in == 0
    assert await rig.next_due(session, limit=2) is None


async def test_next_due_of_a_retry(rig: Rig) -> None:
    """A nacked job is waited for like a delayed one."""
    await rig.add()
    session = await rig.session()
    job = await rig.take(session)
    assert await rig.nack(job) is Applied.APPLIED
    assert await rig.next_due(session) == (await rig.get(job.id)).run_at


async def test_a_paused_queue_is_not_waited_for(rig: Rig) -> None:
    """Its due jobs must not make a worker poll."""
    await rig.add()
    await rig.store.set_paused(QUEUE, True)
    assert await rig.next_due(await rig.session()) is None
