"""Applications on the embedded engines, and what their listener heard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.events import Event
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite import SqliteStore

MakeApp = Callable[..., Holdfast]


@pytest.fixture(params=["memory", "sqlite"])
def engine(request: pytest.FixtureRequest) -> str:
    """The engines that need no server. `make_app` follows it."""
    return str(request.param)


@pytest.fixture
def events() -> list[Event]:
    """What the listener of `make_app` heard."""
    return []


@pytest.fixture
def make_app(engine: str, tmp_path: Path, events: list[Event]) -> Iterator[MakeApp]:
    """Makes an application on the engine; several share one file on SQLite."""
    apps = []

    def make(**options: Any) -> Holdfast:
        store = MemoryStore() if engine == "memory" else SqliteStore(tmp_path / "jobs.db", durability="relaxed")
        app = Holdfast(store, **{"on_event": events.append, **options})
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.close()


@pytest.fixture
def app(make_app: MakeApp) -> Holdfast:
    """An application with the settings as they come."""
    return make_app()
