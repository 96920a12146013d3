"""The survivors that are known, and why no test notices them: `survivors.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.mutation.mutants import Change

FILE = Path(__file__).with_name("survivors.toml")


class Known(NamedTuple):
    """A change by what stays of it when lines move."""

    module: str
    function: str
    before: str
    after: str

    @classmethod
    def of(cls, change: Change) -> Known:
        return cls(change.module, change.function, change.before, change.after)


def read_reasons(file: Path = FILE) -> dict[Known, str]:
    """The reason of each."""
    entries = tomllib.loads(file.read_text()).get("survivor", [])
    return {Known(*(entry[field] for field in Known._fields)): " ".join(entry["reason"].split()) for entry in entries}
