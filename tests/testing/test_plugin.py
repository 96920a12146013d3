"""The pytest plugin, in projects of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SOURCE = Path(__file__).resolve().parents[2] / "src"

APPLICATION = """
    from holdfast import Holdfast

    app = Holdfast("sqlite:////nowhere/to/be/found/jobs.db")


    @app.task
    def greet(name: str, loudly: bool = False) -> str:
        return f"hello, {name}"


    @app.task
    async def agreet(name: str) -> str:
        return f"hello, {name}"


    @app.task
    def broken(name: str) -> None:
        secret_of_the_frame = 1
        raise ValueError(f"no {name}")
"""

INI = """
    [pytest]
    pythonpath = .
    asyncio_mode = auto
    asyncio_default_fixture_loop_scope = function
    filterwarnings = error
    holdfast_app = greeting:app
"""

BARE_INI = "[pytest]\npythonpath = .\nasyncio_default_fixture_loop_scope = function\n"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(greeting=APPLICATION)
    pytester.makeini(INI)
    return pytester


def test_every_test_has_the_jobs_to_itself(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from greeting import greet
        import pytest


        @pytest.mark.parametrize("name", ["ada", "grace"])
        def test_alone(jobs, name):
            jobs.assert_not_enqueued()
            greet.enqueue(name)
            jobs.assert_enqueued(greet, times=1, arguments={"name": name})


        def test_drain_and_clock(jobs):
            greet.options(delay=60).enqueue("ada")
            assert jobs.drain() == []
            jobs.clock.advance(60)
            assert [run.result for run in jobs.drain()] == ["hello, ada"]


        def test_inline(jobs):
            with jobs.inline():
                assert greet.enqueue("ada").result() == "hello, ada"
        """
    )
    project.runpytest().assert_outcomes(passed=4)


def test_asynchronous_tests(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from greeting import agreet, greet


        async def test_drain(jobs):
            job = await agreet.aenqueue("ada")
            await greet.aenqueue("grace")
            assert len(await jobs.adrain()) == 2
            assert await job.aresult() == "hello, ada"


        async def test_inline(jobs):
            jobs.assert_not_enqueued()
            with jobs.inline():
                assert (await agreet.aenqueue("ada")).state == "succeeded"
                assert (await greet.aenqueue("ada")).state == "succeeded"


        def test_a_synchronous_one_between(jobs):
            agreet.enqueue("ada")
            assert len(jobs.drain()) == 1


        async def test_once_more(jobs):
            await agreet.aenqueue("ada")
            assert len(await jobs.adrain()) == 1
        """
    )
    project.runpytest().assert_outcomes(passed=4)


def test_a_failure_shows_the_test_and_what_was_enqueued(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from greeting import greet
        from holdfast.testing.jobs import assert_enqueued


        def test_by_the_fixture(jobs):
            greet.enqueue("ada")
            jobs.assert_enqueued(greet, arguments={"name": "grace"})


        def test_by_the_function(jobs):
            greet.enqueue("ada")
            assert_enqueued(greet, delay=60)
        """
    )
    result = project.runpytest()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            '>*jobs.assert_enqueued(greet, arguments={"name": "grace"})',
            "E*AssertionError: greet with name='grace' was not enqueued. Enqueued were:",
            "E*1. greet(name='ada', loudly=False) on queue default  <- name is 'ada', not 'grace'",
            ">*assert_enqueued(greet, delay=60)",
            "E*AssertionError: greet with delay=60 was not enqueued. Enqueued were:",
            "E*1. greet(name='ada', loudly=False) on queue default  <- delay is 0 s, not 60 s",
        ]
    )
    result.stdout.no_fnmatch_line("*def assert_enqueued*")


def test_a_failed_test_shows_its_failed_jobs(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from greeting import broken


        def test_fails(jobs):
            broken.enqueue("ada")
            jobs.drain()
            assert False


        def test_passes(jobs):
            broken.enqueue("grace")
            jobs.drain()
        """
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*failed jobs*",
            "broken(name='ada'), attempt 1: ready (retried, again in * s): ValueError: no ada",
            "Traceback (most recent call last):",
            "ValueError: no ada",
        ]
    )
    result.stdout.no_fnmatch_line("*grace*")


def test_the_error_of_an_inline_job_points_into_the_handler(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from greeting import broken


        def test_fails(jobs):
            with jobs.inline():
                broken.enqueue("ada")
        """
    )
    result = project.runpytest()
    result.stdout.fnmatch_lines(['*raise ValueError(f"no {name}")', "E*ValueError: no ada"])


def test_a_fixture_of_the_project_names_the_application(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(greeting=APPLICATION)
    pytester.makeini(BARE_INI)
    pytester.makeconftest(
        """
        import pytest


        @pytest.fixture
        def holdfast_app():
            from greeting import app

            return app
        """
    )
    pytester.makepyfile(
        """
        def test_it(jobs):
            from greeting import greet

            greet.enqueue("ada")
            jobs.assert_enqueued(greet)
        """
    )
    pytester.runpytest().assert_outcomes(passed=1)


def test_every_test_can_be_kept_away_from_the_real_store(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        from greeting import greet


        def test_it():
            greet.enqueue("ada")
        """
    )
    project.runpytest().assert_outcomes(failed=1)
    project.runpytest("-o", "usefixtures=jobs").assert_outcomes(passed=1)


def test_without_an_application_the_fixture_says_what_to_do(pytester: pytest.Pytester) -> None:
    pytester.makeini(BARE_INI)
    pytester.makepyfile("def test_it(jobs): ...")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*holdfast_app = shop.jobs:app*"])


def test_an_application_that_is_not_there(pytester: pytest.Pytester) -> None:
    pytester.makeini(BARE_INI + "holdfast_app = nowhere.jobs:app\n")
    pytester.makepyfile("def test_it(jobs): ...")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*InvalidOption: there is no module 'nowhere'*"])


def test_a_project_may_have_its_own_jobs(pytester: pytest.Pytester) -> None:
    pytester.makeini(BARE_INI)
    pytester.makepyfile(
        """
        import pytest


        @pytest.fixture
        def jobs():
            return ["mine"]


        def test_it(jobs):
            assert jobs == ["mine"]
        """
    )
    pytester.runpytest().assert_outcomes(passed=1)


def test_the_plugin_itself_imports_nothing_of_holdfast() -> None:
    """Its parent packages are imported by Python before it; here they are empty."""
    program = """
import importlib.util, sys, types
from pathlib import Path

for name in ("holdfast", "holdfast.testing"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(Path(sys.argv[1], *name.split(".")))]
import holdfast.testing.plugin
print(sorted(name for name in sys.modules if name.startswith(("holdfast", "msgspec"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(SOURCE)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['holdfast', 'holdfast.testing', 'holdfast.testing.plugin']"
