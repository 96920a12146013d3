"""The database file: its mode, where it may lie, and what happens when it is taken away, is no database, or is full."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import StoreError, StoreReplaced, StoreUnavailable, UnsafeStore
from holdfast.ports import Ports, SystemClock
from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.file import file_system_of, refuse_network_file_system
from holdfast.stores.sqlite.log import LOG_BYTES
from tests.sqlite.helpers import claim, is_sound, live_ids, new_job, new_jobs, open_session, raw, run_python

ROOT_MOUNT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, timeout=2)
    yield store
    store.close()


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


# Modes.


@pytest.mark.usefixtures("open_umask")
def test_only_the_owner_may_read_the_file_and_its_side_files(path: Path, store: SqliteStore) -> None:
    store.insert_blocking([new_job()])
    assert {name: mode(name) for name in (f"{path}", f"{path}-wal", f"{path}-shm")} == {
        f"{path}": 0o600,
        f"{path}-wal": 0o600,
        f"{path}-shm": 0o600,
    }


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("chosen", [0o640, 0o666])
def test_the_mode_of_an_existing_file_is_its_owners_choice(path: Path, store: SqliteStore, chosen: int) -> None:
    path.touch()
    path.chmod(chosen)
    store.insert_blocking([new_job()])
    assert (mode(path), mode(f"{path}-wal")) == (chosen, chosen)


def test_a_file_that_another_program_uses_keeps_its_tables(path: Path, store: SqliteStore) -> None:
    theirs = raw(path)
    theirs.execute("CREATE TABLE orders (id INTEGER)")
    theirs.execute("INSERT INTO orders VALUES (1)")
    store.insert_blocking([new_job()])
    assert theirs.execute("SELECT id FROM orders").fetchall() == [(1,)]
    assert len(live_ids(path)) == 1
    theirs.close()


def test_a_symbolic_link_leads_to_one_store(tmp_path: Path, path: Path, store: SqliteStore) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    through_link = SqliteStore(link)
    through_link.insert_blocking([new_job()])
    store.insert_blocking([new_job()])
    through_link.close()
    assert len(live_ids(path)) == 2
    assert not Path(f"{link}-wal").exists()


# Network file systems.


@pytest.mark.parametrize(
    ("mounts", "file", "kind"),
    [
        (["35 27 0:30 / /data rw - nfs4 server:/x rw"], "/data/jobs.db", "nfs4"),
        (["35 27 0:30 / /data rw shared:1 master:2 - cifs //server/x rw"], "/data/jobs.db", "cifs"),
        (["35 27 0:30 / /data rw - 9p host rw"], "/data/deep/er/jobs.db", "9p"),
        (["35 27 0:30 / /data rw - fuse.sshfs me@server:/x rw"], "/data/jobs.db", "fuse.sshfs"),
        (["35 27 0:30 / /data rw - nfs4 server:/x rw"], "/database/jobs.db", "ext4"),  # only the beginning is alike
        (["35 27 0:30 / /data rw - nfs4 server:/x rw"], "/elsewhere/jobs.db", "ext4"),
        (["35 27 0:30 / /data rw - overlay overlay rw"], "/data/jobs.db", "overlay"),
        (["35 27 0:30 / /data rw - tmpfs tmpfs rw"], "/data/jobs.db", "tmpfs"),
        # nested mounts, in any order
        (["35 27 0:30 / /a rw - nfs4 s:/x rw", "36 35 8:1 / /a/local rw - ext4 /dev/b rw"], "/a/local/j.db", "ext4"),
        (["36 35 8:1 / /a/local rw - ext4 /dev/b rw", "35 27 0:30 / /a rw - nfs4 s:/x rw"], "/a/local/j.db", "ext4"),
        (["35 27 0:30 / /a rw - ext4 /dev/b rw", "36 35 8:1 / /a/far rw - nfs4 s:/x rw"], "/a/far/j.db", "nfs4"),
        # a later mount on the same point hides the earlier one
        (["35 27 0:30 / /a rw - ext4 /dev/b rw", "36 35 8:1 / /a rw - nfs4 s:/x rw"], "/a/j.db", "nfs4"),
        # a blank, a tab, a backslash and a letter that is not ASCII
        ([r"35 27 0:30 / /my\040data rw - nfs4 s:/x rw"], "/my data/jobs.db", "nfs4"),
        ([r"35 27 0:30 / /my\011data rw - nfs4 s:/x rw"], "/my\tdata/jobs.db", "nfs4"),
        ([r"35 27 0:30 / /my\134data rw - nfs4 s:/x rw"], "/my\\data/jobs.db", "nfs4"),
        ([r"35 27 0:30 / /Büro\040x rw - nfs4 s:/x rw"], "/Büro x/jobs.db", "nfs4"),
        # lines that nobody understands
        (["", "nonsense", "35 27 0:30 / /data rw nfs4 s:/x rw"], "/data/jobs.db", "ext4"),
    ],
)
def test_the_file_system_is_read_from_the_mounts(mounts: list[str], file: str, kind: str) -> None:
    assert file_system_of(Path(file), "\n".join([ROOT_MOUNT, *mounts, ""])) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "fuse.rclone"])
def test_a_network_file_system_is_refused_at_open(
    kind: str, path: Path, store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"{ROOT_MOUNT}\n35 27 0:30 / {tmp_path} rw - {kind} server:/x rw\n")
    monkeypatch.setattr(
        "holdfast.stores.sqlite.store.refuse_network_file_system",
        lambda path: refuse_network_file_system(path, mounts),
    )
    with pytest.raises(UnsafeStore, match=rf"{kind} file system.*local disk"):
        store.insert_blocking([new_job()])
    assert not path.exists()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "fuseblk"])
def test_a_local_file_system_is_accepted(kind: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"{ROOT_MOUNT}\n35 27 0:30 / /data rw - {kind} /dev/b rw\n")
    refuse_network_file_system(Path("/data/jobs.db"), mounts)


def test_mounts_that_cannot_be_read_are_no_reason_to_refuse(tmp_path: Path) -> None:
    refuse_network_file_system(tmp_path / "jobs.db", tmp_path / "no such file")
    strange = tmp_path / "mountinfo"
    strange.write_bytes(b"35 27 0:30 / /caf\xe9 rw - nfs4 s:/x rw\n")
    refuse_network_file_system(tmp_path / "jobs.db", strange)
    with pytest.raises(UnsafeStore):
        refuse_network_file_system(Path(os.fsdecode(b"/caf\xe9/jobs.db")), strange)


# The file is taken away.


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, but for the index, which is only a cache of the log and of who reads it."""
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.suffix != ".db-shm"}


def delete(path: Path) -> None:
    path.unlink()


def delete_with_side_files(path: Path) -> None:
    for name in (f"{path}", f"{path}-wal", f"{path}-shm"):
        os.unlink(name)


def replace(path: Path) -> None:
    other = raw(path.with_name("other.db"))
    other.execute("CREATE TABLE other (id)")
    other.close()
    path.with_name("other.db").replace(path)


def replace_with_a_copy(path: Path) -> None:
    shutil.copy(path, path.with_name("copy.db"))
    path.with_name("copy.db").replace(path)


def delete_log(path: Path) -> None:
    os.unlink(f"{path}-wal")


def replace_log(path: Path) -> None:
    os.unlink(f"{path}-wal")
    Path(f"{path}-wal").touch()


def delete_index(path: Path) -> None:
    os.unlink(f"{path}-shm")


def remove_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


ACCIDENTS = [
    delete,
    delete_with_side_files,
    replace,
    replace_with_a_copy,
    delete_log,
    replace_log,
    delete_index,
    remove_folder,
]


class LaterClock(SystemClock):
    """A second ahead, so that no folder is too young to go by its times."""

    def now(self) -> int:
        return super().now() + 1_000_000


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_no_job_is_written_to_a_file_that_nobody_will_read(tmp_path: Path, accident: Callable[[Path], None]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "jobs.db"
    store = SqliteStore(path, timeout=2)
    store.insert_blocking([new_job()])
    accident(path)
    before = contents(tmp_path)

    async def use() -> None:
        with pytest.raises(StoreReplaced, match="restart the process"):
            await store.insert([new_job()])
        with pytest.raises(StoreReplaced):
            await open_session(store)

    with pytest.raises(StoreReplaced, match="restart the process"):
        store.insert_blocking([new_job()])
    asyncio.run(use())
    assert contents(tmp_path) == before


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_an_accident_is_noticed_by_the_times_of_the_folder(tmp_path: Path, accident: Callable[[Path], None]) -> None:
    """The usual case: nothing has happened in the folder for a while."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "jobs.db"
    store = SqliteStore(path, timeout=2, ports=Ports(clock=LaterClock()))
    for _ in range(3):
        store.insert_blocking([new_job()])
    assert store._open().writer._identity._folder_checked is not None
    accident(path)
    before = contents(tmp_path)
    for _ in range(2):
        with pytest.raises(StoreReplaced, match="restart the process"):
            store.insert_blocking([new_job()])
    assert contents(tmp_path) == before


def test_other_files_of_the_folder_may_come_and_go(path: Path) -> None:
    store = SqliteStore(path, timeout=2, ports=Ports(clock=LaterClock()))
    for number in range(5):
        path.with_name(f"other {number}").touch()
        store.insert_blocking([new_job()])
        path.with_name(f"other {number}").unlink()
        store.insert_blocking([new_job()])
    store.close()
    assert len(live_ids(path)) == 10


def test_a_folder_further_up_that_is_moved_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    store = SqliteStore(folder / "jobs.db", timeout=2, ports=Ports(clock=LaterClock()))
    for _ in range(3):
        store.insert_blocking([new_job()])
    (tmp_path / "above").rename(tmp_path / "moved")
    before = contents(tmp_path)
    with pytest.raises(StoreReplaced, match="restart the process"):
        store.insert_blocking([new_job()])
    assert contents(tmp_path) == before


def test_a_store_that_was_closed_may_find_another_file(path: Path, store: SqliteStore) -> None:
    store.insert_blocking([new_job()])
    store.close()
    path.unlink()
    store.insert_blocking([new_job()])
    assert len(live_ids(path)) == 1


# What cannot be opened.


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="is a folder: name a file"):
        SqliteStore(tmp_path).insert_blocking([new_job()])


def test_the_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"No such file or directory\. Its folder must exist"):
        SqliteStore(tmp_path / "missing" / "jobs.db").insert_blocking([new_job()])
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("content", [b"this is a letter, not a database\n" * 100, b"SQLite format 3\0" + bytes(4096)])
def test_a_file_that_is_no_database_is_left_alone(path: Path, store: SqliteStore, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreUnavailable, match="damaged or is no database"):
        store.insert_blocking([new_job()])
    assert path.read_bytes() == content


async def test_the_asynchronous_face_raises_the_same_errors(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="is a folder"):
        await SqliteStore(tmp_path).insert([new_job()])
    with pytest.raises(StoreUnavailable, match="Its folder must exist"):
        async with SqliteStore(tmp_path / "missing" / "jobs.db"):
            pytest.fail("it was opened")


def test_a_damaged_page_is_reported_and_the_rest_is_not_written(path: Path, store: SqliteStore) -> None:
    store.insert_blocking(new_jobs(500))
    store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(StoreUnavailable, match="damaged"):
        store.insert_blocking(new_jobs(500))


AS_NOBODY = """
import os, sys
from holdfast.errors import StoreError
from holdfast.job import NewJob
from holdfast.stores.sqlite import SqliteStore, store as module
known = module.shipped()  # the other user may not be able to read our checkout
module.shipped = lambda: known
if os.getuid() == 0:  # modes do not bind root
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
store = SqliteStore(sys.argv[1], timeout=1)
try:
    store.insert_blocking([NewJob(id=sys.argv[2], task="t", payload=b"{}")])
except StoreError as error:
    print(type(error).__name__, error)
else:
    print("inserted")
"""


@pytest.fixture
def public_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-"))
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_another_user_may_write_where_the_modes_allow_it(public_folder: Path) -> None:
    """The control for the tests below: the child really can do it."""
    assert run_python(AS_NOBODY, public_folder / "jobs.db", new_job().id).stdout == "inserted\n"


@pytest.mark.parametrize("there_before", [True, False])
def test_a_read_only_folder(public_folder: Path, there_before: bool) -> None:
    path = public_folder / "jobs.db"
    if there_before:
        store = SqliteStore(path)
        store.insert_blocking([new_job()])
        store.close()
        path.chmod(0o444)
    public_folder.chmod(0o555)
    answer = run_python(AS_NOBODY, path, new_job().id)
    assert answer.stdout.startswith("StoreUnavailable"), answer
    assert "permission" in answer.stdout or "allowed to write there" in answer.stdout
    assert path.exists() == there_before


def test_a_read_only_file(public_folder: Path) -> None:
    path = public_folder / "jobs.db"
    store = SqliteStore(path)
    store.insert_blocking([new_job()])
    store.close()
    path.chmod(0o444)
    answer = run_python(AS_NOBODY, path, new_job().id)
    assert answer.stdout.startswith("StoreUnavailable"), answer
    assert "check the permissions" in answer.stdout
    path.chmod(0o600)
    assert len(live_ids(path)) == 1


def test_a_file_of_another_user(public_folder: Path) -> None:
    path = public_folder / "jobs.db"
    store = SqliteStore(path)
    store.insert_blocking([new_job()])
    store.close()
    path.chmod(0o000)
    answer = run_python(AS_NOBODY, path, new_job().id)
    assert answer.stdout.startswith("StoreUnavailable"), answer
    assert "check the permissions" in answer.stdout
    path.chmod(0o600)


# A full disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small disk; a limited file size stands for it below")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(store: SqliteStore) -> tuple[list[str], str, StoreError]:
    """Insert until it fails: what was accepted, what was refused, and how."""
    accepted: list[str] = []
    while len(accepted) < 10_000:
        job = new_job(payload=b'{"a":"%s"}' % (b"x" * 3000))
        try:
            store.insert_blocking([job])
        except StoreError as error:
            return accepted, job.id, error
        accepted.append(job.id)
    pytest.fail("the disk is never full")


async def test_a_full_disk_refuses_new_jobs_and_keeps_the_old(small_disk: Path) -> None:
    path = small_disk / "jobs.db"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(200_000))
    async with SqliteStore(path, timeout=2) as store:
        session = await open_session(store)
        accepted, refused, error = fill(store)
        assert isinstance(error, StoreUnavailable)
        assert "the disk is full" in str(error)
        assert accepted
        assert live_ids(path) == accepted

        with pytest.raises(StoreUnavailable, match="the disk is full"):
            await store.insert(new_jobs(100, payload=b'{"a":"%s"}' % (b"x" * 3000)))
        assert live_ids(path) == accepted
        assert (await store.get(accepted[0])) is not None
        assert (await store.get(refused)) is None

        ballast.unlink()
        await store.insert([new_job(id=refused)])
        assert live_ids(path) == [*accepted, refused]
        assert [job.id for job in await claim(store, session, limit=3)] == accepted[:3]
    assert is_sound(path)


LIMITED = """
import os, resource, sys
from pathlib import Path
from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.stores.sqlite import SqliteStore
from tests.sqlite.helpers import new_job
path = Path(sys.argv[1])
store = SqliteStore(path, timeout=2)
store.insert_blocking([new_job()])
size = os.path.getsize(f"{path}-wal") + 200_000
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
accepted = []
while True:
    job = new_job(payload=b'{"a":"%s"}' % (b"x" * 3000))
    try:
        store.insert_blocking([job])
    except OutcomeUnknown as error:
        assert list(error.ids) == [job.id], error.ids
        break
    except StoreUnavailable:
        break
    accepted.append(job.id)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
[again] = store.insert_blocking([job])
print(*accepted, again.job_id)
store.close()
"""


def test_a_limited_file_size_is_a_full_disk(path: Path) -> None:
    answer = run_python(LIMITED, path)
    accepted = answer.stdout.split()
    assert len(accepted) > 5, answer
    assert live_ids(path)[1:] == accepted
    assert is_sound(path)


def test_the_file_is_in_wal_mode_and_flushed_at_every_commit(path: Path, store: SqliteStore) -> None:
    def settings(db: sqlite3.Connection) -> list[object]:
        return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]

    assert store._open().writer.peek(settings) == ["wal", 2]
    relaxed = SqliteStore(path, durability="relaxed")
    assert relaxed._open().writer.peek(settings) == ["wal", 1]
    relaxed.close()


def test_a_new_file_has_small_pages_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    def sizes(path: Path) -> tuple[int, int]:
        store = SqliteStore(path)
        ids = [store.insert_blocking([new_job(payload=b'{"a":"%s"}' % (b"x" * 5000))])[0].job_id for _ in range(40)]
        found = [
            store._open().writer.peek(lambda db, name=name: int(db.execute(f"PRAGMA {name}").fetchone()[0]))  # type: ignore[misc]
            for name in ("page_size", "wal_autocheckpoint")
        ]
        store.close()
        assert live_ids(path) == ids
        assert is_sound(path)
        return found[0], found[0] * found[1]

    old = tmp_path / "old.db"
    theirs = raw(old)
    theirs.execute("PRAGMA page_size = 4096")
    theirs.execute("CREATE TABLE orders (id INTEGER)")
    theirs.close()
    assert sizes(tmp_path / "new.db") == (2048, LOG_BYTES)
    assert sizes(old) == (4096, LOG_BYTES)


def test_a_file_with_another_text_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA encoding = 'UTF-16le'")
    connection.execute("CREATE TABLE theirs (text TEXT)")
    connection.close()
    with pytest.raises(UnsafeStore, match="UTF-16le"):
        SqliteStore(path).insert_blocking([new_job()])
