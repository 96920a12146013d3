"""Disks that fail: a file system of the test's own that loses its power, fills up, or can only be read.

It is an ext4 on a loop device. A power cut is asked of the file system itself: from that moment on nothing reaches the
image any more, and what was not flushed is gone, as if the machine had lost its power. It does not tear or reorder
sectors.

All of it is undone at the end, whatever happens: also if the tests are killed, by a small guard process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MEBIBYTE = 1024 * 1024
_SHUTDOWN = 0x8004587D
_WITHOUT_FLUSHING_THE_LOG = 2
_OPTIONS = "loop,noatime,commit=300"
"""The journal is not committed on its own: what nobody flushed is lost for certain."""
_UNMOUNTED_WITHIN = 20.0
_BALLAST = "ballast"


class Disk:
    """A mounted file system; `path` is where. Everybody may write there."""

    def __init__(self, image: Path, path: Path) -> None:
        self._image = image
        self.path = path

    def mount(self) -> None:
        """Make it appear."""
        _run("mount", "-o", _OPTIONS, str(self._image), str(self.path))

    def unmount(self) -> None:
        """Make it disappear. OSError if somebody still uses it after a while."""
        deadline = time.monotonic() + _UNMOUNTED_WITHIN
        while self.path.is_mount():
            done = subprocess.run(["umount", str(self.path)], capture_output=True, check=False)
            if done.returncode and time.monotonic() > deadline:
                raise OSError(errno.EBUSY, done.stderr.decode(errors="replace").strip())
            if done.returncode:
                time.sleep(0.05)

    def abandon(self) -> None:
        """Make it disappear, whoever uses it: it is not seen any more, and vanishes with its last user."""
        try:
            self.unmount()
        except OSError:
            _run("umount", "-l", str(self.path))

    # Power.

    def flush(self) -> None:
        """What was written up to now survives: it is not what the test is about."""
        with _opened(self.path) as folder:
            if ctypes.CDLL(None, use_errno=True).syncfs(folder):
                raise OSError(ctypes.get_errno(), "syncfs failed")

    def cut_power(self) -> None:
        """Nothing is written from now on, and what has not been flushed never was."""
        with _opened(self.path) as folder:
            fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSHING_THE_LOG))

    def restore_power(self) -> None:
        """Mount what is left. Whoever used it must have ended: two at once would both write to it."""
        self.unmount()
        self.mount()

    # Space.

    def fill(self) -> None:
        """Take all the space that is left. What others free meanwhile they can use again."""
        taken = os.open(self.path / _BALLAST, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            for size in (MEBIBYTE, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(taken, b"\0" * size)
            os.fsync(taken)  # the space is taken for good, not only promised
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(taken)

    def free(self) -> None:
        """Give it back."""
        (self.path / _BALLAST).unlink(missing_ok=True)

    # Rights.

    def make_read_only(self) -> None:
        """Nobody can write. It needs that no file is open for writing: otherwise OSError, and nothing has changed."""
        done = subprocess.run(["mount", "-o", "remount,ro", str(self.path)], capture_output=True, check=False)
        if done.returncode:
            raise OSError(errno.EBUSY, done.stderr.decode().strip())

    def make_writable(self) -> None:
        """Everybody can write again."""
        _run("mount", "-o", "remount,rw", str(self.path))


@contextlib.contextmanager
def disk(mebibytes: int = 64) -> Iterator[Disk]:
    """A new, empty one. The test is skipped where we may not mount."""
    refuse_without_rights()
    home = Path(tempfile.mkdtemp(prefix="holdfast-disk-"))
    home.chmod(0o755)  # servers run as users of their own
    made = Disk(home / "image", home / "disk")
    try:
        made.path.mkdir()
        with (home / "image").open("wb") as image:
            image.truncate(mebibytes * MEBIBYTE)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(home / "image"))
        with _guarded(made.path):
            try:
                made.mount()
                made.path.chmod(0o777)
                yield made
            finally:
                made.abandon()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def refuse_without_rights() -> None:
    """Skip the test where a file system cannot be mounted."""
    if os.geteuid() != 0:
        pytest.skip("a disk of the test's own needs root")
    if missing := [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name, path=_PATH) is None]:
        pytest.skip(f"a disk of the test's own needs {', '.join(missing)}")
    if not Path("/dev/loop-control").exists():
        pytest.skip("a disk of the test's own needs loop devices")


_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _run(program: str, *arguments: str) -> None:
    done = subprocess.run([shutil.which(program, path=_PATH) or program, *arguments], capture_output=True, check=False)
    if done.returncode:
        raise OSError(f"{program} {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    opened = os.open(path, os.O_RDONLY)
    try:
        yield opened
    finally:
        os.close(opened)


@contextlib.contextmanager
def _guarded(path: Path) -> Iterator[None]:
    """If our end of the pipe closes without a word, we died, and it is to be unmounted."""
    guard = subprocess.Popen(
        [
            "/bin/sh",
            "-c",
            'read -r word || { umount -l "$1"; rm -rf --one-file-system "${1%/*}"; }',
            "guard",
            str(path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate(b"over\n")
