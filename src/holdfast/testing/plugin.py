"""The pytest plugin: a fixture `jobs`, with which every test has the application's jobs to itself.

pytest imports this module in every run of everybody who has Holdfast installed, so it imports nothing of Holdfast
until a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.testing.calling import Run
    from holdfast.testing.jobs import Jobs


def pytest_addoption(parser: pytest.Parser) -> None:
    """The ini option `holdfast_app`."""
    parser.addini("holdfast_app", "the Holdfast application that the fixture `jobs` is about, as in shop.jobs:app")


@pytest.fixture(scope="session")
def holdfast_app(pytestconfig: pytest.Config) -> Holdfast:
    """The application that `holdfast_app` in the configuration names. A conftest.py may define another."""
    from holdfast.entry.loading import load_app

    name = pytestconfig.getini("holdfast_app")
    if not name:
        raise pytest.UsageError(
            "say which application the fixture `jobs` is about: `holdfast_app = shop.jobs:app` in pytest.ini (or "
            "pyproject.toml), or a fixture `holdfast_app` in conftest.py that returns it"
        )
    return load_app(name)


@pytest.fixture
def jobs(request: pytest.FixtureRequest, holdfast_app: Holdfast) -> Iterator[Jobs]:
    """The application's jobs, in memory, on a clock that stands still: this test's own. See `holdfast.testing.jobs`."""
    from holdfast.testing.jobs import isolated

    def report(run: Run) -> None:
        if run.failed:
            request.node.add_report_section("call", "failed jobs", _told(run))

    with isolated(holdfast_app, on_run=report) as jobs:
        yield jobs


def _told(run: Run) -> str:
    """What went wrong, as it is shown below a test that failed."""
    import traceback

    trace = "" if run.error is None else "".join(traceback.format_exception(run.error))
    return f"{run}\n{trace}"
