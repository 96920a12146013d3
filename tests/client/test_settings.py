"""Settings and store URLs: what is understood, and what is refused with its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast import Holdfast, JobSettings, QueueSettings, Settings
from holdfast.errors import InvalidOption, UnknownPriority
from holdfast.job import DEFAULT_RETENTION, LONGEST_DELAY, MOST_RETRIES
from holdfast.ports import MICROSECONDS
from holdfast.store import DepthLimit
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite import SqliteStore


def test_the_defaults() -> None:
    settings = Settings.parse({})
    assert settings == Settings()
    assert settings.queues.priorities == {"high": 0, "normal": 5, "low": 10}
    assert (settings.jobs.max_retries, settings.jobs.max_payload) == (3, 256 * 1024)
    assert settings.queues.depth_limit("any") is None


def test_everything_can_be_set() -> None:
    settings = Settings.parse(
        {
            "queues": {
                "priorities": {"now": -100, "later": 100},
                "default_priority": "later",
                "max_depth": 10,
                "warn_depth": 5,
                "depths": {"mail": {"max_depth": 3}, "free": {}},
            },
            "jobs": {"max_retries": 0, "retention": 0, "key_window": 0.5, "max_payload": 2},
        }
    )
    assert settings.queues.priority("now") == -100
    assert settings.queues.priority(7) == 7
    assert settings.queues.depth_limit("mail") == DepthLimit(3, None)
    assert settings.queues.depth_limit("free") is None
    assert settings.queues.depth_limit("other") == DepthLimit(10, 5)
    assert settings.jobs == JobSettings(max_retries=0, retention=0, key_window=0.5, max_payload=2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"queue": {}}, "unknown field `queue`"),
        ({"queues": {"maxdepth": 5}}, "unknown field `maxdepth` - at `$.queues`"),
        ({"jobs": {"retries": 5}}, "unknown field `retries` - at `$.jobs`"),
        ({"jobs": {"max_retries": "5"}}, "at `$.jobs.max_retries`"),
        ({"jobs": {"max_retries": 1.5}}, "at `$.jobs.max_retries`"),
        ({"jobs": {"max_retries": -1}}, "from 0 to 1000"),
        ({"jobs": {"max_retries": 1_001}}, "from 0 to 1000"),
        ({"jobs": {"max_payload": 1}}, "max_payload"),
        ({"jobs": {"max_payload": 2**40}}, "max_payload"),
        ({"jobs": {"retention": -1}}, "retention must be from 0 seconds"),
        ({"jobs": {"retention": float("nan")}}, "retention"),
        ({"jobs": {"retention": float("inf")}}, "retention"),
        ({"jobs": {"key_window": 0}}, "key_window"),
        ({"jobs": None}, "at `$.jobs`"),
        ({"jobs": []}, "at `$.jobs`"),
        ({"jobs": {"max_retries": {1}}}, "at `$.jobs.max_retries`"),
        ({"queues": {"max_depth": 0}}, "max_depth must be a whole number from 1"),
        ({"queues": {"warn_depth": -1}}, "warn_depth"),
        ({"queues": {"depths": {"mail": {"max_depth": 0}}}}, "max_depth"),
        ({"queues": {"depths": {"mail": 5}}}, "at `$.queues.depths[...]`"),
        ({"queues": {"depths": {"a b": {}}}}, "queue 'a b' is not a valid name"),
        ({"queues": {"priorities": {"high": 101}}}, "priority 'high'"),
        ({"queues": {"priorities": {"very high": 1}}}, "priority label"),
        ({"queues": {"priorities": {}}}, "priority 'normal' is not configured"),
        ({"queues": {"priorities": {f"p{n}": n for n in range(17)}, "default_priority": 0}}, "at most 16"),
        ({"queues": {"default_priority": "urgent"}}, "priority 'urgent' is not configured"),
        ({"queues": {"default_priority": 101}}, "from -100 to 100"),
        ({1: {}}, "settings"),
        ([], "settings"),
        (None, "settings"),
        ("queues", "settings"),
    ],
    ids=lambda value: f"{value!r:.60}",
)
def test_what_cannot_work_is_refused_with_its_place(values: Any, words: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        Settings.parse(values)
    assert words in str(caught.value)


def test_settings_made_in_code_are_checked_too() -> None:
    with pytest.raises(UnknownPriority):
        QueueSettings(default_priority="urgent")
    with pytest.raises(InvalidOption):
        JobSettings(max_retries=True)
    with pytest.raises(TypeError):
        QueueSettings(max_dept=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QueueSettings(priorities=cast(Any, None)), "priorities must be a mapping, not None"),
        (lambda: QueueSettings(depths=cast(Any, [])), "depths must be a mapping"),
        (lambda: QueueSettings(depths={"mail": cast(Any, {"max_depth": 1})}), "queue 'mail' must be a DepthLimit"),
        (lambda: JobSettings(retention=10**5000), "retention must be from 0 seconds to ten years"),
        (lambda: Settings(queues=cast(Any, {"max_depth": 1})), "queues must be a QueueSettings"),
        (lambda: Settings(jobs=cast(Any, None)), "jobs must be a JobSettings"),
    ],
)
def test_values_of_the_wrong_kind_made_in_code(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        make()


def test_the_bounds_are_those_of_a_job() -> None:
    JobSettings(max_retries=MOST_RETRIES, retention=LONGEST_DELAY / MICROSECONDS)
    with pytest.raises(InvalidOption):
        JobSettings(retention=LONGEST_DELAY / MICROSECONDS + 1)
    assert JobSettings().retention == DEFAULT_RETENTION / MICROSECONDS


# Store URLs.


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Holdfast("sqlite:///jobs.db").store
    assert isinstance(store, SqliteStore)
    assert store.path == tmp_path / "jobs.db"


def test_an_absolute_path_with_odd_characters(tmp_path: Path) -> None:
    folder = tmp_path / "a b#c"
    folder.mkdir()
    app = Holdfast(f"sqlite:///{tmp_path}/a%20b%23c/jobs.db?timeout=2.5&durability=relaxed&namespace=mine")
    assert isinstance(app.store, SqliteStore)
    assert app.store.path == folder / "jobs.db"
    app.task(name="work")(lambda: None).enqueue()
    assert (folder / "jobs.db").exists()
    app.close()


def test_memory() -> None:
    assert isinstance(Holdfast("memory://").store, MemoryStore)
    assert isinstance(Holdfast("memory://?capacity=5").store, MemoryStore)
    store = MemoryStore()
    assert Holdfast(store).store is store


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "no engine for the store URL scheme ''"),
        ("jobs.db", "no engine"),
        ("/var/jobs.db", "no engine"),
        ("mongodb://host/db", "no engine for the store URL scheme 'mongodb': use one of memory://, sqlite://"),
        ("sqlite://jobs.db", "three slashes"),
        ("sqlite://host/jobs.db", "three slashes"),
        ("sqlite:///", "is no file path"),
        ("sqlite://", "is no file path"),
        ("sqlite:///a%00b.db", "NUL character"),
        ("sqlite:///:memory:", "use memory:// for jobs in memory"),
        ("sqlite:///jobs.db?timeout=1&timeout=2", "names an option twice"),
        ("sqlite:///jobs.db?colour=red", "unknown option 'colour': known are namespace, durability, timeout"),
        ("sqlite:///jobs.db?timeout", "option timeout='' is not valid"),
        ("sqlite:///jobs.db?timeout=soon", "option timeout='soon' is not valid"),
        ("sqlite:///jobs.db?timeout=nan", "timeout must be more than 0"),
        ("sqlite:///jobs.db?timeout=-1", "timeout must be more than 0"),
        ("sqlite:///jobs.db?durability=none", "durability must be one of full, relaxed"),
        ("sqlite:///jobs.db?namespace=a-b", "namespace"),
        ("sqlite:///jobs.db?namespace=a;drop", "namespace"),
        ("sqlite:///jobs.db#part", "'#' in it"),
        ("memory://host", "memory:// has no path"),
        ("memory:///path", "memory:// has no path"),
        ("memory://?capacity=many", "capacity"),
        ("memory://?size=5", "unknown option 'size'"),
    ],
)
def test_store_urls_that_cannot_work(url: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption) as caught:
        Holdfast(url)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []
