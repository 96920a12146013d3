"""What a SQLite file says about itself: what an accepted job survives in it, and whether anything is wrong with it.

The file is looked at before it is opened, because opening it would create it or change its schema.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from pathlib import Path

from holdfast.errors import StoreUnavailable
from holdfast.store import Finding, Verdict, oldest_ready
from holdfast.stores.migrations import outdated
from holdfast.stores.sqlite.database import Database
from holdfast.stores.sqlite.file import file_system_of, refuse_network_file_system
from holdfast.stores.sqlite.migrate import is_current, schema_number, shipped
from holdfast.stores.sqlite.writer import store_error

_SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")
_MOST_DAMAGES = 3
_MOUNTS = Path("/proc/self/mountinfo")


def examine_file(path: Path, namespace: str, *, timeout: float, deep: bool) -> list[Finding]:
    """The file from outside, and with `deep` every page of it. Blocking.

    `StoreUnavailable` if there is no such file, `SchemaOutdated` if its schema is not this version's, `UnsafeStore` if
    it is on a network file system.
    """
    try:
        path = path.resolve()
        refuse_network_file_system(path)
        if not path.exists():
            raise StoreUnavailable(f"there is no file {path} yet: migrating, or a first job, makes it")
        # Read-only, and as a URI: an ordinary connection would make a missing file.
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", timeout=timeout, uri=True)) as connection:
            findings = [_file(path), _permissions(path), _schema(connection, path, namespace)]
            return [*findings, _pages(connection)] if deep else findings
    except sqlite3.Error as error:
        raise store_error(error, path) from error
    except (OSError, RuntimeError) as error:  # no permission, or a loop of links
        raise StoreUnavailable(f"cannot look at the database file {path}: {error}") from error


def examine_settings(connection: Database) -> list[Finding]:
    """The settings of the connection that writes: what is written through it survives accordingly."""
    journal = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
    level = int(connection.execute("PRAGMA synchronous").fetchone()[0])
    power_cut = level >= _SYNCHRONOUS.index("FULL")
    survives = "a crash of any process; " + (
        "a power cut, if the disk honours flushes"
        if power_cut
        else "not a power cut: the jobs of the last moments would be lost"
    )
    verdict = Verdict.OK if power_cut else Verdict.WEAK
    return [
        Finding("survives", survives, verdict),
        Finding("journal mode", journal, Verdict.OK if journal == "wal" else Verdict.BAD),
        Finding(
            "synchronous",
            _SYNCHRONOUS[level],
            verdict,
            "" if power_cut else "leave durability=relaxed out of the store URL, and every commit waits for the disk",
        ),
    ]


def examine_waiting(connection: Database, namespace: str, now: int) -> Finding:
    """How long the oldest ready job has been due."""
    row = connection.execute(
        f"""SELECT min(run_at) FROM (SELECT min(run_at) AS run_at FROM {namespace}_live WHERE state = 'ready'
                                     UNION ALL SELECT min(run_at) FROM {namespace}_arrived)"""  # noqa: S608
    ).fetchone()
    return oldest_ready(row[0], now)


def _file(path: Path) -> Finding:
    try:
        kind = file_system_of(path, os.fsdecode(_MOUNTS.read_bytes()))
    except OSError:
        kind = ""
    return Finding("file", f"{path}, {path.stat().st_size:,} bytes on {kind or 'an unknown file system'}")


def _permissions(path: Path) -> Finding:
    modes = {}
    for file in (path, *(path.with_name(path.name + side) for side in ("-wal", "-shm"))):
        with contextlib.suppress(FileNotFoundError):  # the side files come and go
            modes[file.name] = stat.S_IMODE(file.stat().st_mode)
    shown = ", ".join(f"{mode:04o}" for mode in sorted(set(modes.values())))
    if not (exposed := [name for name, mode in modes.items() if mode & 0o077]):
        return Finding("permissions", shown)
    advice = f"other users of this machine can get at the payloads: chmod 600 {' '.join(exposed)}"
    return Finding("permissions", shown, Verdict.WEAK, advice)


def _schema(connection: sqlite3.Connection, path: Path, namespace: str) -> Finding:
    here = schema_number(connection, namespace)
    if not is_current(connection, namespace, shipped()):
        raise outdated(here, shipped(), where=str(path), namespace=namespace)
    return Finding("schema", str(here))


def _pages(connection: sqlite3.Connection) -> Finding:
    damages = [row[0] for row in connection.execute(f"PRAGMA quick_check({_MOST_DAMAGES})").fetchall()]
    if damages == ["ok"]:
        return Finding("integrity", "every page is sound")
    return Finding("integrity", "; ".join(damages), Verdict.BAD, "the file is damaged: restore a backup")
