"""`holdfast dead`: what is replayed, what is removed, and what is left alone."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Holdfast
from holdfast.cli import dead, listing
from holdfast.job import State
from holdfast.lifecycle import Applied, Succeeded, replay
from holdfast.store import Store
from tests.cli.helpers import Shop, in_terminal, key, records, run


def test_only_dead_letters_are_listed(shop: Shop) -> None:
    [job_id] = shop.kill(1, queue="mail", task="welcome")
    shop.add()
    header, line = run("dead", "list", store=shop.url).stdout.splitlines()
    assert header.split() == ["ID", "QUEUE", "TASK", "TRIES", "DIED", "REASON", "ERROR"]
    assert line.split()[:4] == [job_id, "mail", "welcome", "1"]
    assert line.endswith("permanent  ValueError: broken")
    assert [record["id"] for record in records(run("dead", "list", "--json", store=shop.url))] == [job_id]
    assert records(run("dead", "list", "--json", "--queue", "other", store=shop.url)) == []


def test_a_job_that_is_not_dead_is_not_shown_as_one(shop: Shop) -> None:
    [job_id] = shop.add()
    result = run("dead", "show", job_id, store=shop.url)
    assert (result.exit_code, result.stderr) == (1, f"holdfast: job {job_id} is ready, not a dead letter\n")


# Replaying.


def test_replay_by_id(shop: Shop) -> None:
    first, second = shop.kill(2)
    result = run("dead", "replay", first, store=shop.url)
    assert (result.exit_code, result.stdout) == (0, "replayed 1 job\n")
    assert shop.states([first, second]) == [State.READY, State.FAILED]


def test_replay_leaves_alone_what_is_no_dead_letter(shop: Shop) -> None:
    done = shop.finish()
    [letter] = shop.kill()
    result = run("dead", "replay", "nowhere", done, letter, store=shop.url)
    assert (result.exit_code, result.stdout) == (1, "replayed 1 job\n")
    assert f"job {done} is succeeded, not a dead letter" in result.stderr
    assert "there is no job 'nowhere'" in result.stderr
    assert shop.states([done, letter]) == [State.SUCCEEDED, State.READY]


def test_replay_all_goes_through_every_page(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PAGE", 3)
    ids = shop.kill(10)
    done = shop.finish()
    result = run("dead", "replay", "--all", store=shop.url)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "replayed 10 jobs\n", "")
    assert shop.states([*ids, done]) == [State.READY] * 10 + [State.SUCCEEDED]


def test_replay_all_of_a_queue_or_a_task(shop: Shop) -> None:
    mail = shop.kill(2, queue="mail")
    welcome = shop.kill(2, task="welcome")
    assert run("dead", "replay", "--all", "--queue", "mail", store=shop.url).stdout == "replayed 2 jobs\n"
    assert shop.states([*mail, *welcome]) == [State.READY] * 2 + [State.FAILED] * 2
    assert run("dead", "replay", "--all", "--task", "welcome", store=shop.url).stdout == "replayed 2 jobs\n"
    assert shop.states(welcome) == [State.READY] * 2


def test_nothing_to_replay_is_no_failure(shop: Shop) -> None:
    result = run("dead", "replay", "--all", store=shop.url)
    assert (result.exit_code, result.stdout) == (0, "replayed 0 jobs\n")


def test_a_dead_letter_whose_key_is_taken_stays_one(shop: Shop) -> None:
    [letter] = shop.kill(1, key=key("once"))
    shop.add(1, key=key("once"))
    result = run("dead", "replay", "--all", store=shop.url)
    assert (result.exit_code, result.stdout) == (1, "replayed 0 jobs\n")
    assert "idempotency key belongs to another job" in result.stderr
    assert shop.states([letter]) == [State.FAILED]


def test_a_job_that_somebody_replayed_meanwhile_does_not_run_twice(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    [letter] = shop.kill()
    seen = shop.get(letter)
    assert seen is not None

    async def replay_elsewhere(store: Store) -> None:
        assert await store.apply([replay(seen)]) == [Applied.APPLIED]

    shop.use(replay_elsewhere)
    shop.settle(shop.claim(), Succeeded(None))
    assert shop.use(lambda store: dead._replay(store, [seen])) == 0
    assert shop.states([letter]) == [State.SUCCEEDED]
    assert "somebody else" in capsys.readouterr().err


def test_a_store_that_fails_half_way_is_told_how_far_it_came(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PAGE", 2)
    ids = shop.kill(4)
    whole, calls = dead._replay, []

    async def failing(store: Store, jobs: object) -> int:
        calls.append(jobs)
        if len(calls) == 2:
            await store.get("\ud800")  # no engine can look for that
        return await whole(store, jobs)  # type: ignore[arg-type]

    monkeypatch.setattr(dead, "_replay", failing)
    result = run("dead", "replay", "--all", store=shop.url)
    assert result.exit_code == 1
    assert result.stderr.startswith("replayed 2 jobs before this:\nholdfast: ")
    assert sorted(map(str, shop.states(ids))) == ["failed", "failed", "ready", "ready"]


@pytest.mark.parametrize("command", ["replay", "purge"])
@pytest.mark.parametrize(
    "arguments", [(), ("--all", "some-id"), ("some-id", "--queue", "mail"), ("some-id", "--task", "welcome")]
)
def test_jobs_are_named_or_all_are_meant(shop: Shop, command: str, arguments: tuple[str, ...]) -> None:
    [letter] = shop.kill()
    assert run("dead", command, *arguments, store=shop.url).exit_code == 2
    assert shop.states([letter]) == [State.FAILED]


# Removing.


@pytest.mark.parametrize("everything", [True, False])
def test_purge_needs_a_yes(shop: Shop, everything: bool) -> None:
    [letter] = shop.kill()
    which = "--all" if everything else letter
    result = run("dead", "purge", which, store=shop.url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--yes" in result.stderr
    assert shop.states([letter]) == [State.FAILED]
    result = run("dead", "purge", which, "--yes", store=shop.url)
    assert (result.exit_code, result.stdout) == (0, "removed 1 job\n")
    assert shop.states([letter]) == [None]


def test_purge_removes_dead_letters_and_nothing_else(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PAGE", 3)
    letters = shop.kill(7)
    mail = shop.kill(1, queue="mail")
    done = shop.finish()
    assert run("dead", "purge", "--all", "--queue", "default", "--yes", store=shop.url).stdout == "removed 7 jobs\n"
    assert shop.states([*letters, *mail, done]) == [None] * 7 + [State.FAILED, State.SUCCEEDED]
    result = run("dead", "purge", done, "--yes", store=shop.url)
    assert (result.exit_code, result.stdout) == (1, "removed 0 jobs\n")
    assert shop.states([done]) == [State.SUCCEEDED]


@pytest.mark.parametrize(
    ("typed", "code", "left"), [("y\n", 0, None), ("n\n", 1, State.FAILED), ("\x04", 130, State.FAILED)]
)
def test_a_person_is_asked(shop: Shop, typed: str, code: int, left: State | None) -> None:
    [letter] = shop.kill()
    answer, shown = in_terminal("dead", "purge", "--all", "--store", shop.url, typed=typed)
    assert "Remove every dead letter that matches for good?" in shown
    assert "Traceback" not in shown
    assert (answer, shop.states([letter])) == (code, [left])


def test_a_bar_shows_the_progress_to_a_person(shop: Shop) -> None:
    shop.kill(3)
    code, shown = in_terminal("dead", "replay", "--all", "--store", shop.url)
    assert code == 0
    assert "3/3" in shown
    assert shown.rstrip().endswith("replayed 3 jobs")


def test_the_number_of_dead_letters_is_the_queues_own(shop: Shop) -> None:
    shop.kill(2, queue="mail")
    shop.kill(3)

    async def numbers() -> list[int]:
        async with Holdfast(shop.url) as app:
            return [await dead._number(app, queue) for queue in (None, "mail", "nothing")]

    assert asyncio.run(numbers()) == [5, 2, 0]
