"""Install peers by the ordinary clients, pip and npm, each group into a folder of its own under `build/peers`.

What is there already in the pinned versions is left alone. Nothing is patched or forced: a peer that its authors do not
offer for this machine is not installed, and the reason is told.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.catalogue import ADAPTERS, FOLDER, GROUPS, NODE, NODE_AT_LEAST, Entry, Group, named

INSTALL_SECONDS = 300
REASON_LINES = 3
NEWER_PYTHONS = ("3.12", "3.13", "3.14")


class PeerMissingError(RuntimeError):
    """The peer cannot be installed: no node or npm, no network, too old a Python. The message says which."""


@dataclass(frozen=True)
class Outcome:
    """What became of one peer. `reason` says why it is not installed, and is empty if it is."""

    entry: Entry
    reason: str = ""

    @property
    def is_installed(self) -> bool:
        return not self.reason


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def install(
    names: Iterable[str] = (), folder: Path = FOLDER, progress: Callable[[str], None] = _to_stderr
) -> list[Outcome]:
    """Install the peers with these names (`named` says how names are read), and tell what became of each. `progress`
    gets a line for each group.
    """
    entries = named(names)
    reasons: dict[str, str] = {}
    for group in dict.fromkeys(entry.group for entry in entries):
        try:
            was_there = _install_group(group, folder)
        except PeerMissingError as error:
            reasons[group] = str(error)
            progress(f"{group}: not installable: {error}")
        else:
            progress(
                f"{group}: {'already there' if was_there else 'installed'}: {' '.join(GROUPS[group].requirements)}"
            )
    return [Outcome(entry, reasons.get(entry.group, "")) for entry in entries]


def is_installed(entry: Entry, folder: Path = FOLDER) -> bool:
    """Whether the pinned versions of the peer are there."""
    return _is_ready(entry.group, folder)


def command(entry: Entry, folder: Path = FOLDER) -> list[str]:
    """The program of an installed peer; a verb and its arguments are to be added."""
    return [*interpreter(entry.group, folder), str(ADAPTERS / entry.adapter)]


def environment(entry: Entry, folder: Path = FOLDER) -> dict[str, str]:
    """What the program must find in its environment, besides the addresses of the servers and BENCH_MARKS."""
    return {**entry.environment, **module_path(entry.group, folder)}


def interpreter(group: str, folder: Path = FOLDER) -> list[str]:
    """The Python or node that runs the programs of an installed group."""
    if GROUPS[group].language == "python":
        return [str(folder / group / "bin" / "python")]
    own = folder / group / "node_modules" / _node_package() / "bin" / "node"
    return [str(own) if own.exists() else _program("node")]


def module_path(group: str, folder: Path = FOLDER) -> dict[str, str]:
    """Node looks for packages beside the program, and they are not there. A virtual environment needs nothing."""
    if GROUPS[group].language == "python":
        return {}
    return {"NODE_PATH": str(folder / group / "node_modules")}


def _install_group(name: str, folder: Path) -> bool:
    """True if it was there already."""
    if _is_ready(name, folder):
        return True
    group = GROUPS[name]
    target = folder / name
    steps = _python_steps(group, target) if group.language == "python" else _node_steps(group, target)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for step in steps:
        _carry_out(step)
    _stamp(name, folder).write_text(json.dumps(group.requirements))
    return False


def _python_steps(group: Group, target: Path) -> list[list[str]]:
    pip = [str(target / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-qq", "--retries", "1"]
    return [[_python_for(group), "-m", "venv", str(target)], [*pip, "install", *group.requirements]]


def _python_for(group: Group) -> str:
    """This Python; if it is too old for the group, the first newer one on the PATH that has what it takes."""
    if sys.version_info[:2] >= group.python_at_least:
        return sys.executable
    needed = ".".join(map(str, group.python_at_least))
    for version in NEWER_PYTHONS:
        found = shutil.which(f"python{version}")
        # A name on the PATH may be a mere signpost, to a version that is not switched on.
        if version >= needed and found and _run([found, "-c", "import ensurepip, venv"]).returncode == 0:
            return found
    raise PeerMissingError(
        f"{group.requirements[0]} needs Python {needed}, this is {platform.python_version()}, "
        f"and there is no newer one on the PATH"
    )


def _node_steps(group: Group, target: Path) -> list[list[str]]:
    options = ["--prefix", str(target), "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    runtime = [] if _node_version() >= NODE_AT_LEAST else [f"{_node_package()}@{NODE}"]
    return [[_program("npm"), "install", *options, "--fetch-retries=1", *group.requirements, *runtime]]


def _node_version() -> tuple[int, ...]:
    said = _run([_program("node"), "--version"]).stdout
    return tuple(map(int, said.strip().removeprefix("v").split(".")))


def _node_package() -> str:
    """npm has the node of each kind of machine as a package."""
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return f"node-{platform.system().lower()}-{machine}"


def _stamp(group: str, folder: Path) -> Path:
    return folder / group / ".installed.json"


def _is_ready(group: str, folder: Path) -> bool:
    stamp = _stamp(group, folder)
    return stamp.exists() and json.loads(stamp.read_text()) == list(GROUPS[group].requirements)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PeerMissingError(f"{name} is not on this machine")
    return found


def _carry_out(step: Sequence[str]) -> None:
    try:
        outcome = _run(step)
    except subprocess.TimeoutExpired:
        raise PeerMissingError(f"not done within {INSTALL_SECONDS} s: {' '.join(step[-3:])}") from None
    if outcome.returncode != 0:
        lines = [line for line in outcome.stderr.splitlines() if "error" in line.lower()]
        raise PeerMissingError("; ".join(lines[:REASON_LINES]) or f"exit code {outcome.returncode}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
