"""The embedded engine: one file, any number of processes on one machine, every accepted job on disk.

`store.py` is the face, `writer.py` the thread through which every asynchronous write goes, `verbs.py` what a write
does inside its transaction, `file.py` the file and how it is opened, `migrate.py` its schema.
"""

from holdfast.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
