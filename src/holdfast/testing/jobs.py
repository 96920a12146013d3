"""An application under test: its jobs go to a store of the test's own, on a clock that stands still, and run in the
caller when the test says so.

    with isolated(app) as jobs:
        sign_up("ada@example.org")
        jobs.assert_enqueued(welcome, arguments={"address": "ada@example.org"})
        jobs.drain()

The application is the user's own, with the tasks as they are: `Holdfast.replaced` changes its store for the duration.
Nothing of the store that its URL names is opened. The pytest plugin offers the same as a fixture, `jobs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Unpack

from holdfast.app import Holdfast
from holdfast.errors import HoldfastError, InvalidOption, shown
from holdfast.job import Job
from holdfast.ports import MICROSECONDS, SYSTEM, Ports
from holdfast.registry import TaskSpec
from holdfast.sync import refuse_in_event_loop
from holdfast.tasks import Enqueuer
from holdfast.testing.calling import Caller, EndlessJobs, Run, Steps, stops_the_test
from holdfast.testing.expectations import Enqueued, Expectation, Expected, arguments_of, expectation, how_often, listed
from holdfast.testing.frozen import FrozenClock, frozen_ports
from holdfast.testing.inline import MOST_NESTED, wrap
from holdfast.testing.recording import RecordingStore

__all__ = [
    "EndlessJobs",
    "Enqueued",
    "Jobs",
    "Run",
    "adrain",
    "assert_enqueued",
    "assert_not_enqueued",
    "drain",
    "enqueued",
    "inline",
    "isolated",
    "jobs_of",
]

AnyTask = Enqueuer[..., Any] | str
"""A task, or its name."""

MOST_RUNS = 1_000

_under_test: list[Jobs] = []


class Jobs:
    """The jobs of one application under test. Made by `isolated`, and by the fixture `jobs`."""

    def __init__(self, app: Holdfast, store: RecordingStore, ports: Ports, caller: Caller) -> None:
        self.app = app
        self._store = store
        self._ports = ports
        self._caller = caller

    @property
    def clock(self) -> FrozenClock:
        """The clock of the application: `advance` makes delayed jobs due."""
        if not isinstance(self._ports.clock, FrozenClock):
            raise InvalidOption(
                "this application is on the real clock: isolated(app, frozen=True) makes it stand still"
            )
        return self._ports.clock

    @property
    def runs(self) -> list[Run]:
        """Every attempt that ran in the caller so far, oldest first."""
        return self._caller.runs

    # What was enqueued.

    def enqueued(self, task: AnyTask | None = None) -> list[Enqueued]:
        """What was enqueued since the test began, oldest first, whether or not it has run since."""
        name = None if task is None else self._spec(task).name
        return [
            Enqueued(
                recorded.job,
                arguments_of(self.app.tasks[recorded.job.task], recorded.job.payload),
                (self._store.peek(recorded.job.id) or recorded.job).state,
                recorded.on_connection,
            )
            for recorded in list(self._store.recorded)
            if name in (None, recorded.job.task)
        ]

    def assert_enqueued(
        self, task: AnyTask | None = None, *, times: int | None = None, **expected: Unpack[Expected]
    ) -> list[Enqueued]:
        """`AssertionError` unless such a job was enqueued: at least once, or exactly `times`. Which they are.

        What is left out may be anything; of the arguments, too, only those that are given are compared.
        """
        __tracebackhide__ = True
        return self._require(self._expectation(task, expected), times)

    def assert_not_enqueued(self, task: AnyTask | None = None, **expected: Unpack[Expected]) -> None:
        """`AssertionError` if such a job was enqueued. Without a task: if any was."""
        __tracebackhide__ = True
        self._require(self._expectation(task, expected), 0)

    def _require(self, meant: Expectation, wanted: int | None) -> list[Enqueued]:
        __tracebackhide__ = True
        enqueued = self.enqueued()
        found = [job for job in enqueued if meant.meets(job)]
        if wanted is None and not found:
            message = f"{meant} was not enqueued"
        elif wanted == 0 and found:
            message = f"{meant} was enqueued ({how_often(len(found))}), and should not have been"
        elif wanted is not None and len(found) != wanted:
            message = f"{meant} was enqueued {how_often(len(found))}, not {how_often(wanted)}"
        else:
            return found
        raise AssertionError(f"{message}. {listed(enqueued, meant)}")

    def _expectation(self, task: AnyTask | None, expected: Expected) -> Expectation:
        return expectation(None if task is None else self._spec(task), expected, self.app.settings)

    def _spec(self, task: AnyTask) -> TaskSpec:
        if isinstance(task, str):
            return self.app.tasks[task]
        if not _has(self.app, task):
            raise InvalidOption(f"task {task.spec.name} belongs to another application than the one under test")
        return task.spec

    def clear(self) -> None:
        """Forget everything: what was enqueued, what waits, and what ran. The clock stays where it is."""
        self._store.purge()
        self._caller.runs.clear()

    # Running.

    def drain(self, *, scheduled: bool = False, raise_errors: bool = False, limit: int = MOST_RUNS) -> list[Run]:
        """Run everything that is due, here and now, until nothing is; what the jobs enqueue meanwhile, too.

        The order is that of claims: in a queue by priority, then due time; the queue with the earliest job first.
        `scheduled`: go on with what is not due yet, retries included, and advance the clock to each. `raise_errors`:
        raise what a handler raised, after its job was settled. `EndlessJobs` if there is more to run after `limit`.
        """
        refuse_in_event_loop("drain")
        began = len(self.runs)
        self._caller.follow_blocking(self._due(scheduled, raise_errors, limit), lambda job: self._caller.context())
        return self.runs[began:]

    async def adrain(self, *, scheduled: bool = False, raise_errors: bool = False, limit: int = MOST_RUNS) -> list[Run]:
        """The same in an event loop."""
        began = len(self.runs)
        await self._caller.follow(self._due(scheduled, raise_errors, limit), lambda job: self._caller.context())
        return self.runs[began:]

    def _due(self, scheduled: bool, raise_errors: bool, limit: int) -> Steps:
        ran: Counter[str] = Counter()
        while (job := self._next(scheduled)) is not None:
            if ran.total() >= limit:
                self._caller.release(job)
                usual = ", ".join(f"{task} {how_often(count)}" for task, count in ran.most_common(3))
                raise EndlessJobs(
                    f"{limit} jobs ran, and there are more ({usual}; {job.task} is next): do they enqueue one another "
                    f"for ever? If there really are that many, pass limit="
                )
            ran[job.task] += 1
            run = yield job
            if run.error is not None and (stops_the_test(run.error) or (raise_errors and run.failed)):
                raise run.error

    def _next(self, scheduled: bool) -> Job | None:
        while True:
            claimed = self._caller.claim_next()
            if claimed.jobs:
                return claimed.jobs[0]
            if not scheduled or claimed.due_in is None:
                return None
            self.clock.advance(claimed.due_in / MICROSECONDS)

    @contextmanager
    def inline(self, *, raise_errors: bool = True, most_nested: int = MOST_NESTED) -> Iterator[Jobs]:
        """Until the block ends, `enqueue` and its kin run the job before they return.

        What the handler raises, they raise; the job is settled all the same, and waits for its retry. With
        `raise_errors=False` they raise nothing, and retries run at once, without moving the clock. A delayed or snoozed
        job waits for `drain`.
        """
        store = wrap(self._caller, raise_errors=raise_errors, most_nested=most_nested)
        with self.app.replaced(store, self._ports):
            yield self


@contextmanager
def isolated(
    app: Holdfast,
    *,
    frozen: bool = True,
    at: datetime | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Iterator[Jobs]:
    """Until the block ends, the application keeps its jobs in memory, and time stands still for it.

    `at`: the time on its clock, otherwise the present. `frozen=False`: the real clock, for tests with a real worker
    (`app.start_worker()`). `on_run` hears of each attempt that runs in the caller. Isolating the application again
    inside the block begins another, empty world.
    """
    if not isinstance(app, Holdfast):
        raise InvalidOption(f"isolated() takes a Holdfast application, not {shown(app)}")
    if at is not None and not frozen:
        raise InvalidOption("a time (at=) can only be given to a clock that stands still")
    ports = frozen_ports(at) if frozen else SYSTEM
    store = RecordingStore(ports)
    with app.replaced(store, ports) as client:
        jobs = Jobs(app, store, ports, Caller(app, client, store, on_run))
        _under_test.append(jobs)
        try:
            yield jobs
        finally:
            _under_test.remove(jobs)
            client.portal.close()  # what a handler left running there must not go on in the next test


@contextmanager
def inline(app: Holdfast, *, raise_errors: bool = True, most_nested: int = MOST_NESTED) -> Iterator[Jobs]:
    """`Jobs.inline` of the application, which is isolated for the duration if it is not already."""
    if found := _of_app(app):
        with found.inline(raise_errors=raise_errors, most_nested=most_nested):
            yield found
    else:
        with isolated(app) as jobs, jobs.inline(raise_errors=raise_errors, most_nested=most_nested):
            yield jobs


def drain(app: Holdfast, *, scheduled: bool = False, raise_errors: bool = False, limit: int = MOST_RUNS) -> list[Run]:
    """See `Jobs.drain`. The application is isolated."""
    return jobs_of(app).drain(scheduled=scheduled, raise_errors=raise_errors, limit=limit)


async def adrain(
    app: Holdfast, *, scheduled: bool = False, raise_errors: bool = False, limit: int = MOST_RUNS
) -> list[Run]:
    """See `Jobs.adrain`. The application is isolated."""
    return await jobs_of(app).adrain(scheduled=scheduled, raise_errors=raise_errors, limit=limit)


def enqueued(app: Holdfast, task: AnyTask | None = None) -> list[Enqueued]:
    """See `Jobs.enqueued`. The application is isolated."""
    return jobs_of(app).enqueued(task)


def assert_enqueued(
    task: Enqueuer[..., Any], *, times: int | None = None, **expected: Unpack[Expected]
) -> list[Enqueued]:
    """See `Jobs.assert_enqueued`. The application of the task is isolated."""
    __tracebackhide__ = True
    return _of_task(task).assert_enqueued(task, times=times, **expected)


def assert_not_enqueued(task: Enqueuer[..., Any], **expected: Unpack[Expected]) -> None:
    """See `Jobs.assert_not_enqueued`. The application of the task is isolated."""
    __tracebackhide__ = True
    _of_task(task).assert_not_enqueued(task, **expected)


def jobs_of(app: Holdfast) -> Jobs:
    """The jobs of an application that is isolated at present."""
    if found := _of_app(app):
        return found
    raise HoldfastError(
        "this application is not under test, and its real jobs are left alone: use the fixture `jobs`, or "
        "`with isolated(app) as jobs:`"
    )


def _of_app(app: Holdfast) -> Jobs | None:
    return next((jobs for jobs in reversed(_under_test) if jobs.app is app), None)


def _of_task(task: Enqueuer[..., Any]) -> Jobs:
    if found := next((jobs for jobs in reversed(_under_test) if _has(jobs.app, task)), None):
        return found
    raise HoldfastError(
        f"the application of task {task.spec.name} is not under test: use the fixture `jobs`, or "
        f"`with isolated(app) as jobs:`"
    )


def _has(app: Holdfast, task: Enqueuer[..., Any]) -> bool:
    return task.spec.name in app.tasks and app.tasks[task.spec.name] is task.spec
