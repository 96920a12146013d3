"""What the watcher of `holdfast demo` notices: what happened lately, and how fast jobs end and start."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from holdfast.cli.demo_feed import Died, Ended, Killed, Ready, Told
from holdfast.cli.demo_ledger import Latency, latency
from holdfast.cli.demo_view import News
from holdfast.cli.wording import counted
from holdfast.job import JobId, Reason, State
from holdfast.ports import SYSTEM

_SAME_AGAIN_AFTER = 4.0
_LATENCY_SECONDS = 10.0
_RATE_SECONDS = 3
_MOST_RATES = 24
_MOST_NEWS = 100


class Newsroom:
    """Counts seconds from its making."""

    def __init__(self) -> None:
        self._began = SYSTEM.clock.monotonic()
        self._said_at: dict[str, float] = {}
        self._ended: Counter[int] = Counter()
        self._waits: deque[tuple[float, float]] = deque()
        self.news: deque[News] = deque(maxlen=_MOST_NEWS)
        self._said = 0
        self.ready = 0
        """Worker processes that have started up so far."""
        self.died = 0
        """Processes that died so far, of workers and of jobs that ran alone."""
        self.stopping = False
        """Whether processes have been asked to end: it is no news then that one does."""
        self.last_end = 0.0

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return SYSTEM.clock.monotonic() - self._began

    # News.

    def hear(self, told: Iterable[Told]) -> list[JobId]:
        """Note what the workers told. The jobs that have ended by what they say."""
        ended = []
        for each in told:
            match each:
                case Ended():
                    ended.append(each.job_id)
                    self._hear_end(each)
                case Ready():
                    self.ready += 1
                    self.say(f"worker {each.pid} is ready", "green")
                case Died() | Killed() if self.stopping:
                    pass
                case Died():
                    self.died += 1
                    self._hear_death(each)
                case Killed():
                    self.say(f"process {each.pid} was killed: {each.why}", "red")
        return ended

    def _hear_end(self, ended: Ended) -> None:
        tried = counted(ended.attempt, "attempt")
        if ended.state is State.CANCELLED:
            self._say_now_and_then("cancelled", f"{ended.task} was cancelled while it ran", "")
        elif ended.reason is Reason.CRASHED:
            self.say(f"dead letter: {ended.task}, {tried}, it crashes when it runs alone", "yellow")
        elif ended.state is State.FAILED:
            self._say_now_and_then("failed", f"dead letter: {ended.task}, {tried}, {ended.error}", "yellow")
        elif ended.attempt > 1 and ended.task == "flaky":
            self._say_now_and_then("retried", f"{ended.task} succeeded at attempt {ended.attempt}", "")

    def _hear_death(self, died: Died) -> None:
        if died.job_id:
            self.say(f"process {died.pid} died: {died.how}; it ran the suspect alone", "red")
        else:
            some = "its job is back" if died.jobs == 1 else f"its {died.jobs} jobs are back"
            jobs = some if died.jobs else "it held no job"
            self.say(f"worker {died.pid} died: {died.how}; {jobs}", "bold red")

    def say(self, text: str, style: str = "") -> None:
        """Note one piece of news."""
        self._said += 1
        self.news.append(News(self._said, self.seconds, text, style))

    def _say_now_and_then(self, about: str, text: str, style: str) -> None:
        """What happens all the time must not push the rest out of sight."""
        now = self.seconds
        if now - self._said_at.get(about, -_SAME_AGAIN_AFTER) >= _SAME_AGAIN_AFTER:
            self._said_at[about] = now
            self.say(text, style)

    # Figures.

    def count(self, ended: int, waits: Iterable[float]) -> None:
        """So many jobs were seen at their end just now, and so long they had waited to start."""
        now = self.seconds
        if ended:
            self.last_end = now
            self._ended[int(now)] += ended
            self._ended.pop(int(now) - _MOST_RATES - 1, None)
        self._waits.extend((now, wait) for wait in waits)
        while self._waits and self._waits[0][0] < now - _LATENCY_SECONDS:
            self._waits.popleft()

    @property
    def rates(self) -> list[int]:
        """Jobs that ended in each of the last whole seconds."""
        this = int(self.seconds)
        return [self._ended[second] for second in range(max(0, this - _MOST_RATES), this)]

    @property
    def rate(self) -> float:
        """Jobs per second, of the last three."""
        latest = self.rates[-_RATE_SECONDS:]
        return sum(latest) / len(latest) if latest else 0.0

    @property
    def latency(self) -> Latency:
        """Of the jobs that were seen at their end in the last ten seconds."""
        return latency(wait for _, wait in self._waits)
