"""Where a claim begins to look in each lane.

PostgreSQL leaves the index entries of claimed rows behind until no transaction can see them any more. While another
transaction holds an old snapshot, they pile up at the head of every lane, and a claim that begins there reads them all.
So a busy claimer begins where its last claim of the lane ended, and looks back from time to time: a little often, at
everything seldom, each depth for about a fiftieth of the time, and at least every 20 s. While nothing piles up, it
costs nothing and happens with nearly every claim. What can lie behind: jobs whose transaction committed late, and jobs
that somebody gave back to their old place. Of the latter a claimer is told (`listener.py`), and looks at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.job import Job
from holdfast.lanes import Lane, serving_order
from holdfast.ports import MICROSECONDS, Clock
from holdfast.store import ClaimRequest
from holdfast.stores.postgres.alike import Options

_DEPTHS = (0, 2 * MICROSECONDS, 20 * MICROSECONDS, None)
"""How far back a claim looks, from not at all to everything (None)."""

_EVERYTHING = len(_DEPTHS) - 1
_SHARE_OF_TIME = 50
"""A look back is repeated no sooner than this many times as long as it took."""
_CHEAP = 0.02
"""A look at everything that took no more seconds than this is repeated whenever a claim found too little."""
_AS_CHEAP = 3
"""So is one that took no more than so many times as long as not looking back at all: then it is the machine that is
slow, and nothing has piled up."""
_FADES = 0.9
"""What is known about not looking back, after each look back: it has to be tried again at times."""
_LEAST_INTERVAL = 0.25
_LONGEST_INTERVAL = 20.0
_LANES_CHECKED_EVERY = 5.0
_FEW_LANES = 8
_LOWEST, _HIGHEST = -1_000, 1_000
"""Beyond every priority."""
_NEXT = "\x01"
"""Appended to a share: the next text after it that could be one, as shares have no control characters."""
_BEYOND_SHARES = "\U0010ffff" * 33
"""After every share: they have at most 128 bytes."""
_lane_of = attrgetter("queue", "priority", "share")


class Plan(msgspec.Struct, frozen=True):
    """What to ask for: see the function `claim`. `depth`: an index of `_DEPTHS`. `came_back`: how often jobs had.
    `same`: what the jobs of the last claim had in common, if this one is of the same lane alone.
    """

    lanes: list[dict[str, Any]]
    gaps: list[dict[str, Any]]
    groups: list[list[int]]
    depth: int
    begun: float
    came_back: int
    same: Options | None = None


class LookBack:
    """The lanes known, where the last claim of each ended, and when each depth was looked at. Claims of several threads
    may share it: what one writes over another costs a look, no job.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lanes: dict[str, list[Lane]] = {}
        self._learned: dict[str, float] = {}
        self._due: dict[Lane, bool] = {}
        self._reached: dict[Lane, int] = {}
        self._looked = [0.0] * len(_DEPTHS)
        self._took = [0.0] * len(_DEPTHS)
        self._came_back = 0
        """How often jobs came back to old places."""
        self._behind: set[str] = set()
        """The queues in which they did, and were not looked for yet."""
        self._same: tuple[Lane, Options] | None = None
        """What the jobs of the last claim from one lane alone had in common, all but a few."""
        self._hungry = True
        """Whether the last claim got less than it asked for."""

    def learn(self, queues: Iterable[str], lanes: Iterable[Sequence[Any]]) -> None:
        """These are all the lanes of the queues."""
        found = [Lane(*lane) for lane in lanes]
        now = self._clock.monotonic()
        for queue in queues:
            self._lanes[queue] = sorted(lane for lane in found if lane.queue == queue)
            self._learned[queue] = now
        kept = {*found, *(lane for lane in list(self._due) if lane.queue not in queues)}
        self._due = {lane: self._due.get(lane, True) for lane in kept}
        self._reached = {lane: at for lane, at in list(self._reached.items()) if lane in kept}

    def forget_place(self, queues: Collection[str] | None) -> None:
        """Jobs have come back to their old place in these queues, or may have in any: the next claim looks for them."""
        self._came_back += 1
        self._behind |= {*self._lanes} if queues is None else {*queues}

    def believe(self, plan: Plan, due: str | None) -> None:
        """In these of the plan's lanes something is due, by their places from 1."""
        places = set(msgspec.json.decode(due)) if due else set()
        for place, lane in enumerate(plan.lanes, 1):
            self._due[_lane(lane)] = place in places

    def plan(self, request: ClaimRequest, *, exactly: bool) -> Plan:
        """What to ask for now. `exactly`: all lanes with due jobs take part and no others, or nothing is claimed."""
        now = self._clock.monotonic()
        came_back = self._came_back
        depth = self._depth(now)
        plan = Plan([], [], [], depth, now, came_back)
        for queue in request.queues:
            lanes = self._lanes.get(queue, [])
            if len(lanes) > _FEW_LANES and now - self._learned[queue] > max(
                _LANES_CHECKED_EVERY, _SHARE_OF_TIME * self._took[_EVERYTHING]
            ):
                self._lanes[queue] = lanes = []  # those that are empty for good must not be asked for ever
            if exactly:
                plan.gaps.extend(_gaps(queue, lanes))
            due = []
            for lane in lanes:
                believed = self._due.get(lane, True) if exactly and len(lanes) > 1 else None
                plan.lanes.append(_named(lane, since=self._since(lane, depth), due=believed))
                if believed is not False:
                    due.append(lane)
            places = {lane: place for place, lane in enumerate(lanes, start=len(plan.lanes) - len(lanes) + 1)}
            plan.groups.extend([places[lane] for lane in group] for group in serving_order(due, request.turn))
        same = self._same  # looked at once: another thread may write it meanwhile
        if same is not None and [same[0]] == [_lane(named) for named in plan.lanes]:
            return replace(plan, same=same[1])
        return plan

    def _is_cheap(self) -> bool:
        """Whether a look at everything costs next to nothing."""
        return self._took[_EVERYTHING] <= max(_CHEAP, _AS_CHEAP * self._took[0])

    def _depth(self, now: float) -> int:
        if (self._hungry or self._behind) and self._is_cheap():
            return _EVERYTHING
        # Somebody waits for this look. Yet if jobs come back all the time, it takes no more than half of the time.
        if self._behind and now - self._looked[_EVERYTHING] >= self._took[_EVERYTHING]:
            return _EVERYTHING
        for depth in range(_EVERYTHING, 0, -1):
            interval = min(max(_LEAST_INTERVAL, _SHARE_OF_TIME * self._took[depth]), _LONGEST_INTERVAL)
            if now - self._looked[depth] >= interval:
                return depth
        return 0

    def _since(self, lane: Lane, depth: int) -> int:
        reached, back = self._reached.get(lane), _DEPTHS[depth]
        return 0 if reached is None or back is None else max(0, reached - back)

    def again(self, plan: Plan, jobs: Sequence[Job], limit: int, same: Options | None = None) -> bool:
        """Take note of what a claim brought, and of what all its jobs had in common. Whether to ask once more, because
        it looked back too little.
        """
        now = self._clock.monotonic()
        self._hungry = len(jobs) < limit
        # A deep look is a look at what is less deep, too.
        for depth in range(1, plan.depth + 1):
            self._looked[depth] = now
        if plan.depth or self._hungry:  # what it takes to claim many is no measure of looking
            # One stall is no cost of looking: it counts as far as the next look confirms it.
            self._took[plan.depth] = min(now - plan.begun, 2 * self._took[plan.depth] + _CHEAP / 2)
        if plan.depth:
            self._took[0] *= _FADES
        if plan.depth == _EVERYTHING and plan.came_back == self._came_back:  # else it may have been too early for some
            behind, self._behind = self._behind, set()
            self._reached = {lane: at for lane, at in list(self._reached.items()) if lane.queue not in behind}
        alone = len(plan.lanes) == 1
        for job in jobs[-1:] if alone else _last_of_each_lane(jobs):
            lane = Lane(*_lane_of(job))
            self._reached[lane] = max(job.run_at, self._reached.get(lane, 0))
            self._same = (lane, same) if alone and same is not None else None
        return self._hungry and plan.depth < _EVERYTHING and self._is_cheap()

    def due_in(self, plan: Plan, due_in: int | None) -> int | None:
        """When to ask again after a claim that got too little: soon, if it may have missed what lies behind."""
        if plan.depth == _EVERYTHING and plan.came_back == self._came_back:
            return due_in
        soon = int(_LEAST_INTERVAL * MICROSECONDS)
        return soon if due_in is None else min(due_in, soon)


def _last_of_each_lane(jobs: Iterable[Job]) -> Iterable[Job]:
    """Those that a claim served last: they come in order."""
    return {_lane_of(job): job for job in jobs}.values()


def _lane(named: Mapping[str, Any]) -> Lane:
    return Lane(named["queue"], named["priority"], named["share"])


def _named(lane: Lane, **more: object) -> dict[str, Any]:
    return {"queue": lane.queue, "priority": lane.priority, "share": lane.share, **more}


def _gaps(queue: str, lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """The spaces before, between and after these sorted lanes: a job there is in a lane that is not known."""
    gaps: list[dict[str, Any]] = []
    below = _LOWEST
    for priority, group in groupby(lanes, key=attrgetter("priority")):
        gaps.append({"queue": queue, "after_priority": below, "before_priority": priority})
        below, share = priority, ""
        for lane in group:
            if share < lane.share:
                gaps.append({"queue": queue, "priority": priority, "from_share": share, "to_share": lane.share})
            share = lane.share + _NEXT
        gaps.append({"queue": queue, "priority": priority, "from_share": share, "to_share": _BEYOND_SHARES})
    gaps.append({"queue": queue, "after_priority": below, "before_priority": _HIGHEST})
    return gaps
