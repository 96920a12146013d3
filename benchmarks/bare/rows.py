"""The columns of a job in the bare tables: as many and as wide as the engines have, so that rows weigh the same."""

from collections.abc import Mapping, Sequence


def names(columns: Sequence[str]) -> str:
    """The names of columns that are defined so."""
    return ", ".join(column.split()[0] for column in columns)


def changed(columns: Sequence[str], values: Mapping[str, str]) -> str:
    """The names again, with expressions in the place of some."""
    return ", ".join(values.get(name, name) for name in (column.split()[0] for column in columns))


def columns(*, id: str, text: str, small: str, whole: str, big: str, binary: str, empty: str = "''") -> list[str]:
    """The definitions, by the types of an engine. What an enqueue does not name has its default."""
    return [
        f"id {id} NOT NULL",
        f"task {text} NOT NULL",
        f"payload {binary} NOT NULL",
        f"task_version {text} NOT NULL DEFAULT '1'",
        f"queue {text} NOT NULL DEFAULT 'bench'",
        f"share {text} NOT NULL DEFAULT ''",
        f"priority {small} NOT NULL DEFAULT 5",
        f"max_retries {whole} NOT NULL DEFAULT 3",
        f"retention {big} NOT NULL DEFAULT 604800000000",
        f"unique_key {text}",
        f"key_hash {text}",
        f"key_window {big}",
        f"correlation_id {text}",
        f"created_at {big} NOT NULL",
        f"reason {text} NOT NULL DEFAULT 'enqueued'",
        f"run_at {big} NOT NULL",
        f"version {whole} NOT NULL DEFAULT 0",
        f"session_id {text}",
        f"attempt {whole} NOT NULL DEFAULT 0",
        f"failures {whole} NOT NULL DEFAULT 0",
        f"crashes {whole} NOT NULL DEFAULT 0",
        f"snoozes {whole} NOT NULL DEFAULT 0",
        f"suspect {small} NOT NULL DEFAULT 0",
        f"claimed_at {big}",
        f"failure_history {binary} NOT NULL DEFAULT {empty}",
    ]


def ended(*, text: str, big: str, binary: str) -> list[str]:
    """What a job has beside that when it has ended."""
    return [f"state {text} NOT NULL", f"ended_at {big} NOT NULL", f"expires_at {big}", f"result {binary}"]
