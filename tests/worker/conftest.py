"""A bench per test: an engine, and what the test builds on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker import shop as importable
from tests.worker.bench import ENGINES, Bench, Heard, Tally
from tests.worker.shop import STORE, Shop, named


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a job looks often: hundreds of tests do."""
    monkeypatch.setattr("holdfast.client._SLOWEST_POLL", 0.01)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The engines that need no server."""
    return str(request.param)


@pytest.fixture
def bench(engine: str, tmp_path: Path) -> Iterator[Bench]:
    """Where applications and workers of a test are made, and closed after it."""
    bench = Bench(engine, tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def heard(bench: Bench) -> Heard:
    """What the listener of the bench's applications has heard."""
    return bench.heard


@pytest.fixture
def tally(bench: Bench) -> Tally:
    """What the handlers of a test have counted."""
    return bench.tally


@pytest.fixture
def keeps_what_it_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gives nothing back merely because it waits for long."""
    monkeypatch.setattr("holdfast.worker.runner._STALE_AFTER", 3600.0)


@pytest.fixture
def short_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers that were asked to stop, and a store that is asked for the last time, have less time than usual."""
    monkeypatch.setattr("holdfast.worker.service._TIME_TO_CLEAN_UP", 0.3)
    monkeypatch.setattr("holdfast.worker.event_loop._TIME_TO_CLEAN_UP", 0.3)
    monkeypatch.setattr("holdfast.worker.service._LAST_CALL", 0.5)


@pytest.fixture
def frequent_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is kept sooner than usual."""
    monkeypatch.setattr("holdfast.worker.service._PROGRESS_EVERY", 0.05)


@pytest.fixture
def shop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """The application whose isolated handlers run in processes of their own."""
    if bench.engine == "sqlite":
        monkeypatch.setenv(STORE, f"sqlite:///{bench.path}")
    shop = Shop(bench.store(), on_event=bench.heard, middleware=[named])
    monkeypatch.setattr(importable, "app", shop.app)
    bench.keep(shop.app)
    return shop
