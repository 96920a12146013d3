"""Makes the log as long as it will become, at once.

A commit that lengthens the log costs twice as much as one that overwrites it: the file system has to note where the
new blocks are, and that is flushed with it. SQLite overwrites the log from its beginning after each checkpoint, so it
only grows until the first: some hundred commits, each time that the file is opened when nobody else has it open.

What follows the last whole frame of a log means nothing: SQLite reads up to the first frame that does not belong to it
(https://www.sqlite.org/fileformat2.html#walformat), and zeros are no frame. The caller holds the write lock, so
nobody else adds frames or shortens the log meanwhile.
"""

from __future__ import annotations

import os

LOG_BYTES = 4 * 1024 * 1024
"""Of pages in the log, until a commit brings them to the file: SQLite's own default with pages of 4 KiB."""
_WITH_HEADERS = LOG_BYTES + LOG_BYTES // 32
_ZEROS = bytes(256 * 1024)


def lengthen(log: str, size: int = _WITH_HEADERS) -> None:
    """Fill the log with zeros from its end to that size, on disk. If there is no room, it stays as it was.

    A log that SQLite has not begun, or that is as long already, is left alone.
    """
    # No lock of SQLite's is on this file, so closing it releases none.
    descriptor = os.open(log, os.O_WRONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(descriptor).st_size
        if not 0 < before < size:
            return
        try:
            end = before
            while end < size:
                end += os.pwrite(descriptor, _ZEROS[: size - end], end)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, before)
    finally:
        os.close(descriptor)
