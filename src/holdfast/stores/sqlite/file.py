"""The database file: how it is made, opened, and watched so that it cannot be exchanged unnoticed.

SQLite in WAL mode needs shared memory and POSIX locks, so a network file system breaks its promises; a file that is
deleted or replaced while it is open would swallow jobs without an error. Both are refused here.
"""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path

from holdfast.errors import InvalidOption, StoreError, StoreReplaced, StoreUnavailable, UnsafeStore, shown
from holdfast.job import check_name
from holdfast.ports import Clock
from holdfast.stores.sqlite.log import LOG_BYTES

NETWORK_FILE_SYSTEMS = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "9p",
        "ceph",
        "glusterfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ocfs2",
        "gfs2",
        "davfs",
        "vboxsf",
        "vmhgfs",
        "prl_fs",
    ]
)
OLDEST_SQLITE = (3, 37)
_DURABILITIES = ("full", "relaxed")
"""STRICT tables."""
_PAGE_BYTES = 2048
_PAUSE_BETWEEN_TRIES = 0.003
_SAME_TIME_POSSIBLE = 100_000
"""Microseconds. File systems stamp changes with a clock that ticks every few milliseconds."""
_OCTAL = re.compile(rb"\\([0-7]{3})")
_NETWORK_FUSE = ("sshfs", "s3fs", "gcsfuse", "rclone", "glusterfs", "davfs", "smbnetfs", "blobfuse", "ceph")


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`, from the text of /proc/self/mountinfo ('' if it is not there)."""
    found, depth = "", -1
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        # The kernel writes blanks and backslashes as octal escapes, and every other byte as it is.
        point = Path(os.fsdecode(_OCTAL.sub(lambda escape: bytes([int(escape[1], 8)]), os.fsencode(fields[4]))))
        if path.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = right.split()[0], len(point.parts)
    return found


def refuse_network_file_system(path: Path, mounts_file: Path = Path("/proc/self/mountinfo")) -> None:
    """`UnsafeStore` if the file lies on a network file system that this machine can name."""
    try:
        mounts = os.fsdecode(mounts_file.read_bytes())
    except OSError:
        return
    kind = file_system_of(path, mounts)
    if kind in NETWORK_FILE_SYSTEMS or any(word in kind for word in _NETWORK_FUSE):
        raise UnsafeStore(
            f"{path} is on a {kind} file system. SQLite cannot keep accepted jobs safe over a network: "
            f"put the file on a local disk, or use PostgreSQL, MySQL or Redis"
        )


def create_private(path: Path) -> None:
    """Make the file if it is missing, readable by its owner alone. SQLite gives its side files the same mode."""
    if path.is_dir():
        raise StoreUnavailable(f"{path} is a folder: name a file in it for the database")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise StoreUnavailable(
            f"cannot create the database file {path}: {error.strerror}. Its folder must exist, and this user must be "
            f"allowed to write there"
        ) from error


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody else was in the way, so that trying again helps."""
    return (getattr(error, "sqlite_errorname", "") or "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def connect(path: Path, *, durable: bool, timeout: float, clock: Clock) -> sqlite3.Connection:
    """An open connection with our settings. Any thread may use it, one at a time: callers hold a lock.

    Whoever opens a new file first, or closes it last, has it to himself for a moment. SQLite's own waiting is of no
    use then: where two wait for each other it refuses one at once.
    """
    deadline = clock.monotonic() + timeout
    while True:
        try:
            return _connect(path, durable=durable)
        except sqlite3.Error as error:
            if not is_busy(error) or clock.monotonic() >= deadline:
                raise
        clock.pause(_PAUSE_BETWEEN_TRIES)


def _connect(path: Path, *, durable: bool) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise UnsafeStore(
            f"SQLite {sqlite3.sqlite_version} is too old: this store needs {'.'.join(map(str, OLDEST_SQLITE))} or newer"
        )
    connection = sqlite3.connect(
        path,
        timeout=0,  # waiting for the lock is ours to do: see `writer.py`
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    try:
        for pragma in (
            # Only a new file takes it. A commit writes whole pages, and an insert changes a few hundred bytes of each.
            f"page_size = {_PAGE_BYTES}",
            "journal_mode = WAL",
            # FULL: a commit returns when the disk has it. NORMAL survives a crash of the process, not a power cut.
            f"synchronous = {'FULL' if durable else 'NORMAL'}",
            "trusted_schema = OFF",
            "cell_size_check = ON",
            "temp_store = MEMORY",
            "cache_size = -4096",
        ):
            connection.execute(f"PRAGMA {pragma}")
        mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
        if mode != "wal":
            raise UnsafeStore(f"{path} cannot use a write-ahead log (its journal mode is {mode!r})")
        encoding = connection.execute("PRAGMA encoding").fetchone()[0]
        if encoding != "UTF-8":
            raise UnsafeStore(
                f"{path} keeps its text as {encoding}, in which payloads would be other bytes than were given: use a "
                f"file of its own for the jobs, or one that was made with UTF-8"
            )
        page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
        connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_BYTES // page_bytes}")
    except BaseException:
        connection.close()
        raise
    return connection


class _ByName:
    """A file, recognised by the name that Linux gives for a descriptor of it: a deleted or moved one has another.

    Not by `stat`: asking for the times of the log makes the kernel write them anew with the next commit, which costs a
    quarter of an insert. A path-only descriptor holds none of SQLite's locks, so closing it releases none.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        self._link = f"/proc/self/fd/{self._descriptor}"
        self._name = os.readlink(self._link)

    def is_the_same(self) -> bool:
        return os.readlink(self._link) == self._name

    def close(self) -> None:
        os.close(self._descriptor)


class _ByNumber:
    """A file, recognised by its device and inode: for systems without /proc."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._number = self._look()

    def _look(self) -> tuple[int, int]:
        status = os.stat(self._path)
        return status.st_dev, status.st_ino

    def is_the_same(self) -> bool:
        return self._look() == self._number

    def close(self) -> None:
        """Nothing is held."""


_Recognised = _ByName if os.path.exists("/proc/self/fd") and hasattr(os, "O_PATH") else _ByNumber


class FileIdentity:
    """Notices that the database file, its log or its index is no longer the one that was opened."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = str(path)
        self._folder = str(path.parent)
        self._folder_checked: tuple[int, int, int, int] | None = None
        self._clock = clock
        self._file = self._recognise(self._path)
        self._side_files: dict[str, _ByName | _ByNumber] = {}

    def _recognise(self, path: str) -> _ByName | _ByNumber:
        try:
            return _Recognised(path)
        except OSError as error:
            raise self._missing(path, error) from error

    def _check(self, path: str, known: _ByName | _ByNumber) -> None:
        try:
            if known.is_the_same():
                return
        except OSError as error:
            raise self._missing(path, error) from error
        if not os.path.lexists(path):
            raise self._missing(path, FileNotFoundError())
        raise StoreReplaced(
            f"{path} was replaced by another file while it was open. Nothing more is written to the old one: restart "
            f"the process to use the new one, and make backups with SQLite's backup API"
        )

    @staticmethod
    def _missing(path: str, error: OSError) -> StoreError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return StoreReplaced(
                f"{path} was deleted while it was open. Nothing more is written to it, since it would be lost: "
                f"restore the file and restart the process"
            )
        return StoreUnavailable(f"cannot look at {path}: {error.strerror}; nothing was written")

    def forget_side_files(self) -> None:
        """SQLite makes its side files anew when it opens the file again: take whatever is there then."""
        for known in self._side_files.values():
            known.close()
        self._side_files = {}
        self._folder_checked = None

    def check_file(self) -> None:
        """`StoreReplaced` if the database file itself was deleted or exchanged."""
        self._check(self._path, self._file)

    def check(self) -> None:
        """`StoreReplaced` if a file was deleted or exchanged. Call it before every write.

        No file of a folder can be deleted, moved or replaced without a trace in the folder's own times. So one look at
        those is enough, unless they are so young that a second change might bear the same time.
        """
        try:
            status = os.stat(self._folder)
        except OSError as error:
            raise self._missing(self._folder, error) from error
        folder = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        if folder == self._folder_checked:
            return
        self._check_files()
        settled = self._clock.now() - max(status.st_mtime_ns, status.st_ctime_ns) // 1000
        self._folder_checked = folder if settled > _SAME_TIME_POSSIBLE else None

    def _check_files(self) -> None:
        self.check_file()
        if not self._side_files:
            # They exist from the first transaction on, for as long as anybody has the file open.
            self._side_files = {path: self._recognise(path) for path in (f"{self._path}-wal", f"{self._path}-shm")}
        for path, known in self._side_files.items():
            self._check(path, known)

    def close(self) -> None:
        """Let go of the files."""
        self.forget_side_files()
        self._file.close()


def check_options(path: str | os.PathLike[str], *, namespace: str, durability: str, timeout: float) -> None:
    """`InvalidOption` for what no store could be opened with."""
    if str(path) in ("", ":memory:") or str(path).startswith("file:"):
        raise InvalidOption(
            f"{str(path)!r} is no file path: give the store a file, or use memory:// for jobs in memory"
        )
    if "\0" in str(path):
        raise InvalidOption(f"the file path {shown(str(path))} has a NUL character in it")
    if durability not in _DURABILITIES:
        raise InvalidOption(f"durability must be one of {', '.join(_DURABILITIES)}, not {shown(durability)}")
    if not 0 < timeout <= 3600:
        raise InvalidOption(f"timeout must be more than 0 and at most 3600 seconds, not {shown(timeout)}")
    if not check_name("namespace", namespace).isidentifier():
        raise InvalidOption(f"namespace {namespace!r} must be letters, digits and '_': it begins table names")
