"""The shape of the package: where nondeterminism enters, what is never used, how long a module may be, and that the
error tree is the one that its page draws.

Code is read, not run: `uses` follows imports and their aliases through the syntax tree and lists every dotted name
that a module uses. Annotations are left out: naming a type is not using it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "holdfast"
MODULES = sorted(PACKAGE.rglob("*.py"))
PORTS = PACKAGE / "ports.py"
# The conformance suite is test code that is shipped: its races need real threads and real time.
SUITE = PACKAGE / "testing" / "suite"

# A name here forbids itself and everything below it.
NONDETERMINISTIC = {
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.monotonic_ns",
    "time.perf_counter",
    "time.perf_counter_ns",
    "time.process_time",
    "time.thread_time",
    "time.clock_gettime",
    "time.clock_gettime_ns",
    "time.localtime",
    "time.sleep",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
    "random",
    "secrets",
    "uuid",
    "uuid_utils",
    "os.urandom",
    "os.getrandom",
    "os.fork",
    "os.posix_spawn",
    "os.system",
    "os.popen",
    "threading.Thread",
    "threading.Timer",
    "_thread.start_new_thread",
    "concurrent.futures.Executor",
    "concurrent.futures.ThreadPoolExecutor",
    "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.thread",
    "concurrent.futures.process",
    "asyncio.sleep",
    "asyncio.to_thread",
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
    "asyncio.tasks.sleep",
    "asyncio.subprocess",
    "subprocess",
    "multiprocessing",
}

DANGEROUS = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "jsonpickle",
    "marshal",
    "shelve",
    "builtins.eval",
    "builtins.exec",
    "builtins.__import__",
    "multiprocessing.reduction",
}

# The simulation is the other set of ports: its chance comes from a seed and its sleep passes no time. A campaign is
# outside of it: it gives each of many seeds to some process.
OTHER_PORTS = {
    "src/holdfast/testing/simulation/loop.py": {"random", "random.Random"},
    "src/holdfast/testing/simulation/ports.py": {"asyncio.sleep"},
    "src/holdfast/testing/simulation/faulty.py": {"asyncio.sleep"},
    "src/holdfast/testing/simulation/swarm.py": {"random"},
    "src/holdfast/testing/simulation/campaign.py": {
        "multiprocessing",
        "multiprocessing.get_context",
        "concurrent.futures.ProcessPoolExecutor",
    },
}

BUILTINS = {"eval", "exec", "__import__"}


class _Uses(ast.NodeVisitor):
    """Collects (line, dotted name) for every use of something imported, and of the builtins that run text."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._meaning: dict[str, str] = {name: f"builtins.{name}" for name in BUILTINS}

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self.found.append((node.lineno, name.name))
            self._meaning[name.asname or name.name.split(".")[0]] = (
                name.name if name.asname else name.name.split(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            dotted = f"{node.module}.{name.name}"
            self.found.append((node.lineno, dotted))
            self._meaning[name.asname or name.name] = dotted

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if dotted := self._dotted(node):
            self.found.append((node.lineno, dotted))
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._meaning:
            self.found.append((node.lineno, self._meaning[node.id]))

    def visit_Call(self, node: ast.Call) -> None:
        """Besides what a call uses by its syntax: `getattr(time, "sleep")` and `import_module("random")`."""
        called = self._dotted(node.func)
        texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
            owner = self._dotted(node.args[0])
            if owner and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
                self.found.append((node.lineno, f"{owner}.{node.args[1].value}"))
        if called in {"importlib.import_module", "builtins.__import__"} and texts:
            self.found.append((node.lineno, str(texts[0])))
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    visit_FunctionDef = _visit_function
    visit_AsyncFunctionDef = _visit_function

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._meaning.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._dotted(node.value)):
            return f"{owner}.{node.attr}"
        return None


def uses(source: str) -> list[tuple[int, str]]:
    """Every (line, dotted name) that the source uses."""
    reader = _Uses()
    tree = ast.parse(source)
    # Imports first, wherever they stand: a function may use what is imported further down.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            reader.visit(node)
    reader.found.clear()
    reader.visit(tree)
    return reader.found


def matches(used: str, forbidden: set[str]) -> bool:
    """Is that name, or something that contains it, forbidden? `from time import *` uses everything of `time`."""
    parts = used.split(".")
    if parts[-1] == "*":
        return any(name == used[:-2] or name.startswith(used[:-1]) for name in forbidden)
    return any(".".join(parts[: length + 1]) in forbidden for length in range(len(parts)))


def offences(source: str, forbidden: set[str]) -> list[str]:
    """What the source uses though it must not, as `line: name`."""
    return [f"{line}: {name}" for line, name in uses(source) if matches(name, forbidden)]


def offending(modules: list[Path], forbidden: set[str]) -> dict[str, list[str]]:
    found = {str(path.relative_to(ROOT)): offences(path.read_text(encoding="utf-8"), forbidden) for path in modules}
    return {path: uses for path, uses in found.items() if uses}


# The package.


def test_there_is_something_to_read() -> None:
    assert PORTS in MODULES
    assert len(MODULES) > 10


def test_time_chance_ids_and_threads_enter_through_ports_only() -> None:
    checked = [path for path in MODULES if path != PORTS and not path.is_relative_to(SUITE)]
    found = [
        f"{path}:{line}"
        for path, lines in offending(checked, NONDETERMINISTIC).items()
        for line in lines
        if line.split(": ")[1] not in OTHER_PORTS.get(path, set())
    ]
    assert found == []


def test_ports_itself_would_be_caught() -> None:
    caught = {line.split(": ")[1] for line in offences(PORTS.read_text(encoding="utf-8"), NONDETERMINISTIC)}
    assert {"time.time_ns", "time.monotonic", "time.sleep", "asyncio.sleep", "threading.Thread"} <= caught
    assert {"random.random", "secrets.token_hex", "uuid_utils.uuid7"} <= caught


def test_nothing_runs_text_or_unpickles() -> None:
    shipped = [
        path for folder in ("scripts", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert offending(MODULES + shipped, DANGEROUS) == {}


# The checker: each forbidden form in a sample must be caught, and what is allowed must not be.

SAMPLES = {
    "import time\ntime.time()": "2: time.time",
    "import time\ntime.time_ns()": "2: time.time_ns",
    "import time\ntime.monotonic()": "2: time.monotonic",
    "import time\ntime.perf_counter()": "2: time.perf_counter",
    "import time\ntime.sleep(1)": "2: time.sleep",
    "import time as t\nt.sleep(1)": "2: time.sleep",
    "from time import sleep": "1: time.sleep",
    "from time import monotonic as m": "1: time.monotonic",
    "from time import *": "1: time.*",
    "import time\nnap = time.sleep": "2: time.sleep",
    "import time\ndef f(nap=time.sleep): ...": "2: time.sleep",
    "import time\nclass C:\n    nap = staticmethod(time.sleep)": "3: time.sleep",
    "import time\ngetattr(time, 'sleep')(1)": "2: time.sleep",
    "def f():\n    import time\n    return time.time()": "3: time.time",
    "def f(): return time.time()\nimport time": "1: time.time",
    "import datetime\ndatetime.datetime.now()": "2: datetime.datetime.now",
    "import datetime as dt\ndt.datetime.utcnow()": "2: datetime.datetime.utcnow",
    "from datetime import datetime\ndatetime.now(UTC)": "2: datetime.datetime.now",
    "from datetime import datetime as d\nd.today()": "2: datetime.datetime.today",
    "from datetime import date\ndate.today()": "2: datetime.date.today",
    "import random": "1: random",
    "import random as r": "1: random",
    "from random import choice": "1: random.choice",
    "from random import *": "1: random.*",
    "import importlib\nimportlib.import_module('random')": "2: random",
    "from importlib import import_module\nimport_module('secrets')": "2: secrets",
    "import secrets": "1: secrets",
    "from secrets import token_hex": "1: secrets.token_hex",
    "import uuid": "1: uuid",
    "from uuid import uuid4": "1: uuid.uuid4",
    "import uuid_utils": "1: uuid_utils",
    "import uuid_utils.compat": "1: uuid_utils.compat",
    "from uuid_utils.compat import uuid7": "1: uuid_utils.compat.uuid7",
    "import os\nos.urandom(16)": "2: os.urandom",
    "from os import urandom": "1: os.urandom",
    "import os\nos.fork()": "2: os.fork",
    "import threading\nthreading.Thread(target=f).start()": "2: threading.Thread",
    "import threading\nclass Mine(threading.Thread): ...": "2: threading.Thread",
    "from threading import Thread": "1: threading.Thread",
    "import threading\nthreading.Timer(1, f)": "2: threading.Timer",
    "import concurrent.futures\nconcurrent.futures.ThreadPoolExecutor()": "2: concurrent.futures.ThreadPoolExecutor",
    "from concurrent import futures\nfutures.ProcessPoolExecutor()": "2: concurrent.futures.ProcessPoolExecutor",
    "from concurrent.futures import ThreadPoolExecutor": "1: concurrent.futures.ThreadPoolExecutor",
    "from concurrent.futures.thread import ThreadPoolExecutor": "1: concurrent.futures.thread.ThreadPoolExecutor",
    "import asyncio\nasync def f(): await asyncio.sleep(1)": "2: asyncio.sleep",
    "from asyncio import sleep": "1: asyncio.sleep",
    "import asyncio\nasync def f(): await asyncio.to_thread(g)": "2: asyncio.to_thread",
    "import subprocess": "1: subprocess",
    "from subprocess import run": "1: subprocess.run",
    "import multiprocessing": "1: multiprocessing",
    "from multiprocessing import Process": "1: multiprocessing.Process",
    "import multiprocessing.pool": "1: multiprocessing.pool",
}

DANGEROUS_SAMPLES = {
    "import pickle": "1: pickle",
    "from pickle import loads": "1: pickle.loads",
    "import marshal": "1: marshal",
    "import marshal as m": "1: marshal",
    "import shelve": "1: shelve",
    "import cloudpickle": "1: cloudpickle",
    "eval('1')": "1: builtins.eval",
    "exec('x = 1')": "1: builtins.exec",
    "run = exec": "1: builtins.exec",
    "import builtins\nbuiltins.eval('1')": "2: builtins.eval",
    "__import__('pickle')": "1: pickle",
    "import importlib\nimportlib.import_module('marshal')": "2: marshal",
}

ALLOWED = [
    "import time\ntime.strftime('%Y', t)",
    "from datetime import UTC, datetime, timedelta\ndatetime.fromtimestamp(0, UTC)",
    "import threading\nlock = threading.Lock()\nlocal = threading.local()\ndone = threading.Event()",
    "import threading\nthread: threading.Thread | None = None",
    "import threading\ndef f(thread: threading.Thread) -> threading.Thread: ...",
    "import threading\nclass C:\n    _thread: threading.Thread\n    async def f(self) -> threading.Thread: ...",
    "from concurrent.futures import Future",
    "import asyncio\nasyncio.get_running_loop().call_soon(f)",
    "import os\nos.path.join('a', 'b')",
    "class Clock:\n    def sleep(self): ...\nclock.sleep(1)\nself.ports.random.fraction()",
    "def f(random, secrets): return random.fraction()",
    "ports.random.fraction()",
    "import re\nre.compile('a')",
    "connection.execute('SELECT 1')\ncursor.executescript('')",
    "from holdfast.ports import Random\nRandom",
    "'eval(1)'  # exec('x')",
]


@pytest.mark.parametrize(("source", "offence"), SAMPLES.items())
def test_every_forbidden_form_is_caught(source: str, offence: str) -> None:
    assert offence in offences(source, NONDETERMINISTIC)


@pytest.mark.parametrize(("source", "offence"), DANGEROUS_SAMPLES.items())
def test_every_dangerous_form_is_caught(source: str, offence: str) -> None:
    assert offence in offences(source, DANGEROUS)


@pytest.mark.parametrize("source", ALLOWED)
def test_what_is_allowed_is_not_caught(source: str) -> None:
    assert offences(source, NONDETERMINISTIC | DANGEROUS) == []


# Length.

MOST_LINES = 450
# The reference engine: every verb of the port, next to the state that all of them share.
LONGER = {"stores/memory.py": 550}


def test_no_module_is_too_long() -> None:
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {path: count for path, count in lines.items() if count > LONGER.get(path, MOST_LINES)} == {}


def test_no_exception_for_length_outlives_its_reason() -> None:
    for path in LONGER:
        assert len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) > MOST_LINES, path


# The error tree.

BRANCH = re.compile(r"^    (?P<indent>(?:│   |    )*)(?:[├└]── )?(?P<name>[A-Z]\w+)(?: {2,}(?P<meaning>.*))?$")
ALSO = re.compile(r"\(also an? (\w+)\)")


def drawn(docstring: str) -> Iterator[tuple[str, str | None, set[str]]]:
    """(name, parent, other bases) for each line of the tree in the docstring."""
    above: list[str] = []
    for line in docstring.splitlines():
        if not (branch := BRANCH.match(line)):
            continue
        depth = len(branch["indent"]) // 4 + ("── " in line)
        del above[depth:]
        yield branch["name"], above[-1] if above else None, set(ALSO.findall(branch["meaning"] or ""))
        above.append(branch["name"])


def defined() -> Iterator[tuple[str, str | None, set[str]]]:
    """The same for the classes of the module."""
    for name, error in inspect.getmembers(errors, inspect.isclass):
        if error.__module__ == errors.__name__ and issubclass(error, BaseException):
            ours = [base.__name__ for base in error.__bases__ if base.__module__ == errors.__name__]
            others = {base.__name__ for base in error.__bases__ if base.__module__ != errors.__name__}
            yield name, ours[0] if ours else None, others - {"Exception"}


def test_the_error_tree_is_the_one_that_is_drawn() -> None:
    assert sorted(drawn(errors.__doc__ or ""), key=lambda line: line[0]) == sorted(defined(), key=lambda line: line[0])


def test_the_tree_reader_reads_a_tree() -> None:
    tree = """Title.

    Root
    ├── One    first (also a ValueError)
    │   └── Under
    └── Two
        └── Last

End."""
    assert list(drawn(tree)) == [
        ("Root", None, set()),
        ("One", "Root", {"ValueError"}),
        ("Under", "One", set()),
        ("Two", "Root", set()),
        ("Last", "Two", set()),
    ]


def test_every_error_says_what_it_is() -> None:
    for name, _, _ in defined():
        assert (getattr(errors, name).__doc__ or "").strip().endswith("."), name
