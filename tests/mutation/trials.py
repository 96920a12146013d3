"""Trials: the tests of one module, run against one mutant after the other, each in a forked process.

The tests are collected once. A trial forks, puts the mutant's code into the function and runs the tests that reach that
function: first those that noticed another mutant of it, then the quickest. The first test that fails ends the trial. A
mutant that takes effect on import is imported in place of the module, by a pytest of its own.
"""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

from tests.mutation.mutants import Change, Mutant, mutants_of

BUSY_LIMIT = 2.0
"""Seconds of processor time that a test may take, beyond five times its usual. A loop without an end is found by this,
however busy the machine is."""
STILL_LIMIT = 5.0
"""Seconds that a test may sleep without doing anything, with the same addition: for those that wait for what never
comes. One that does not get the processor does not sleep."""


class Verdict(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"


class Trial(NamedTuple):
    """A change, what became of it, and the test that noticed it, or hung with it."""

    change: Change
    verdict: Verdict
    test: str


class BrokenBaseline(Exception):
    """The tests fail without any mutant, so they prove nothing."""


def try_module(module: str, tests: Sequence[str]) -> list[Trial]:
    """Every mutant of the module on trial. Wants a process of its own, and silences it."""
    assert module not in sys.modules, f"{module} has been imported already"
    _silence()
    path = path_of(module)
    mutants = list(mutants_of(path.read_text(), module, str(path)))
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as folder:
        # Assertions as they are: pytest would rewrite the modules of its plugins, and so import them itself.
        options = ["--assert=plain", "-p", "no:cacheprovider", f"--basetemp={folder}/tests", *tests]
        seen = _observe(path, options)
        bench = _Bench([mutant for mutant in mutants if mutant.change.function], seen)
        trials = [_try_on_import(mutant, path, options, seen) for mutant in mutants if not mutant.change.function]
        if pytest.main(options, plugins=[_SameExamples(), bench]):
            raise BrokenBaseline(f"the tests of {module} cannot be collected")
    return sorted([*trials, *bench.trials], key=lambda trial: trial.change.line)


def path_of(module: str) -> Path:
    """Where the module is, found without importing anything."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"there is no package {package}"
    if not rest:
        return Path(spec.origin or "")
    [folder] = spec.submodule_search_locations or []
    return Path(folder, *rest).with_suffix(".py")


# One process.

Say = Callable[[dict[str, Any]], object]


class _End(NamedTuple):
    """How a process ended, and the test that it was at."""

    verdict: Verdict
    test: str


def _in_a_process(run: Callable[[Say], int], usual: Mapping[str, float], heard: Say = lambda message: None) -> _End:
    """Fork, and run it there; what it returns is the exit code. A test beyond its limits ends the process."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run(lambda message: os.write(writable, json.dumps(message).encode() + b"\n"))
        finally:
            os._exit(code)
    os.close(writable)
    test, unread, sleep = "", b"", _Sleep(pid)
    try:
        while sleep.seconds() < _limit(STILL_LIMIT, usual, test):
            if not select.select([readable], [], [], 0.5)[0]:
                continue
            read = os.read(readable, 65_536)
            if not read:
                break
            *lines, unread = (unread + read).split(b"\n")
            for line in lines:
                message = json.loads(line)
                test = message["test"]
                heard(message)
        else:
            os.kill(pid, signal.SIGALRM)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(readable)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code in (-signal.SIGALRM, -signal.SIGPROF):
        return _End(Verdict.TIMED_OUT, test)
    return _End(Verdict.SURVIVED, "") if code == 0 else _End(Verdict.KILLED, test)


class _Sleep:
    """For how long a process has slept and done nothing, as far as Linux tells."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._worked = ""
        self._since = time.monotonic()

    def seconds(self) -> float:
        state, *rest = self._stat.read_text().rpartition(")")[2].split()
        worked = " ".join(rest[10:12])  # processor time, its own and the system's for it
        if state not in "SZ" or worked != self._worked:
            self._worked, self._since = worked, time.monotonic()
        return time.monotonic() - self._since


def _limit(seconds: float, usual: Mapping[str, float], test: str) -> float:
    return seconds + 5 * usual.get(test, 5.0)


def _silence() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)


class _SameExamples:
    """A plugin: random tests see the same examples in every trial, and do not look for the smallest that fails."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # must not be imported before pytest is ready for it

        settings.register_profile(
            "trials", database=None, derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("trials")


class _Judge:
    """A plugin inside a trial: says which test begins, keeps an eye on its time, and ends with the first failure."""

    def __init__(self, say: Say, usual: Mapping[str, float]) -> None:
        self._say = say
        self._usual = usual

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._usual.get(item.nodeid, 0.0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say({"test": nodeid})
        signal.setitimer(signal.ITIMER_PROF, _limit(BUSY_LIMIT, self._usual, nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(1)


# The tests without any mutant.


class _Seen(NamedTuple):
    """What each test takes, in seconds, and which tests reach each function."""

    usual: dict[str, float]
    reaching: dict[str, set[str]]


class _Observer:
    """A plugin that says of every test how long it took, and which functions of the module it reached."""

    def __init__(self, path: Path, say: Say) -> None:
        self._path = str(path)
        self._say = say
        self._reached: set[str] = set()
        self._began = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._reached.clear()
        self._began = time.monotonic()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.setprofile(None)
        self._say({"test": nodeid, "seconds": time.monotonic() - self._began, "reached": sorted(self._reached)})

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == self._path:
            self._reached.add(frame.f_code.co_qualname.split(".<locals>")[0])


def _observe(path: Path, options: list[str]) -> _Seen:
    seen = _Seen({}, defaultdict(set))

    def learn(message: dict[str, Any]) -> None:
        if "seconds" in message:
            seen.usual[message["test"]] = message["seconds"]
            for function in message["reached"]:
                seen.reaching[function].add(message["test"])

    end = _in_a_process(
        lambda say: int(pytest.main(options, plugins=[_SameExamples(), _Judge(say, {}), _Observer(path, say)])),
        {},
        learn,
    )
    if end.verdict is not Verdict.SURVIVED:
        raise BrokenBaseline(f"without any mutant: {end.test or 'the collection of the tests'} fails or takes too long")
    return seen


# Mutants that take effect when they are called.


class _Bench:
    """A plugin that, instead of running the collected tests once, runs them in a process per mutant."""

    def __init__(self, mutants: Sequence[Mutant], seen: _Seen) -> None:
        self._mutants = mutants
        self._seen = seen
        self._noticed: dict[str, list[str]] = defaultdict(list)
        self.trials: list[Trial] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.trials = [self._try(session, items, mutant) for mutant in self._mutants]
        return True

    def _try(self, session: pytest.Session, items: dict[str, pytest.Item], mutant: Mutant) -> Trial:
        function = mutant.change.function
        noticed = self._noticed[function]
        usual = self._seen.usual
        others = sorted(self._seen.reaching[function].difference(noticed), key=lambda test: usual[test])
        chosen = [items[test] for test in [*noticed, *others]]
        end = _in_a_process(lambda say: self._run(session, chosen, mutant, say), usual)
        if end.verdict is Verdict.KILLED:
            self._noticed[function] = [end.test, *(test for test in noticed if test != end.test)]
        return Trial(mutant.change, *end)

    def _run(self, session: pytest.Session, items: Sequence[pytest.Item], mutant: Mutant, say: Say) -> int:
        name = mutant.change.function
        operator.attrgetter(name)(sys.modules[mutant.change.module]).__code__ = _code_in(mutant.code, name)
        session.config.pluginmanager.register(_Judge(say, self._seen.usual))
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return 0


def _code_in(code: CodeType, function: str) -> CodeType:
    """The code of a function or method of a module."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_qualname == function:
                return inner
            if function.startswith(f"{inner.co_qualname}."):
                return _code_in(inner, function)
    raise LookupError(function)


# Mutants that take effect on import.


def _try_on_import(mutant: Mutant, path: Path, options: list[str], seen: _Seen) -> Trial:
    def run(say: Say) -> int:
        sys.meta_path.insert(0, _MutantFinder(mutant, path))
        return int(pytest.main(options, plugins=[_SameExamples(), _Judge(say, seen.usual)]))

    return Trial(mutant.change, *_in_a_process(run, seen.usual))


class _MutantFinder(MetaPathFinder):
    """Imports the mutant where the module is asked for."""

    def __init__(self, mutant: Mutant, path: Path) -> None:
        self._mutant = mutant
        self._path = path

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self._mutant.change.module:
            return None
        loader = _MutantLoader(fullname, str(self._path))
        loader.mutant = self._mutant
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


class _MutantLoader(SourceFileLoader):
    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        return self.mutant.code
