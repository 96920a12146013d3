"""`holdfast jobs`: what is listed, what is shown, what is kept from sight."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.cli import listing
from holdfast.client import JobPage
from holdfast.job import State
from holdfast.lifecycle import Failed, Succeeded
from tests.cli.helpers import HOSTILE, SECRET, Shop, failure, key, records, run

LISTED = {
    "id", "state", "reason", "queue", "task", "priority", "attempt", "failures", "crashes", "snoozes", "max_retries",
    "correlation_id", "created_at", "run_at", "claimed_at", "ended_at", "error",
}  # fmt: skip
SHOWN = LISTED | {
    "task_version", "share", "key", "retention", "session_id", "suspect", "cancel_asked", "progress", "result",
    "failure_history",
}  # fmt: skip
ISO_8601 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three jobs a page."""
    monkeypatch.setattr(listing, "_PAGE", 3)


# Listing.


def test_a_list_has_a_line_for_each_job_newest_first(shop: Shop) -> None:
    ids = shop.add(3, queue="mail")
    result = run("jobs", "list", store=shop.url)
    assert result.exit_code == 0
    header, *lines = result.stdout.splitlines()
    assert header.split() == ["ID", "STATE", "QUEUE", "TASK", "TRIES", "AGE", "NOTE"]
    assert [line.split()[:5] for line in lines] == [[i, "ready", "mail", "resize", "0"] for i in reversed(ids)]


def test_the_columns_are_aligned_and_lines_have_no_blanks_at_their_end(shop: Shop) -> None:
    shop.add(1, queue="q")
    shop.add(1, queue="a-much-longer-name")
    lines = run("jobs", "list", store=shop.url).stdout.splitlines()
    assert len({line.index("resize") for line in lines[1:]} | {lines[0].index("TASK")}) == 1
    assert all(line == line.rstrip() for line in lines)


def test_the_store_is_an_option_too(shop: Shop) -> None:
    [job_id] = shop.add()
    assert job_id in run("jobs", "list", "--store", shop.url).stdout


def test_an_empty_list_says_so_beside_the_answer(shop: Shop) -> None:
    result = run("jobs", "list", store=shop.url)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no jobs\n")


def test_filters(shop: Shop) -> None:
    [dead] = shop.kill(1, queue="mail")
    [waiting] = shop.add(1, queue="mail", task="welcome", correlation_id="order-7")
    done = shop.finish()

    def found(*filters: str) -> set[str]:
        return {record["id"] for record in records(run("jobs", "list", "--json", *filters, store=shop.url))}

    assert found() == {dead, waiting, done}
    assert found("--state", "failed") == {dead}
    assert found("--state", "failed", "--state", "succeeded") == {dead, done}
    assert found("--queue", "mail") == {dead, waiting}
    assert found("--task", "welcome") == {waiting}
    assert found("--correlation-id", "order-7") == {waiting}
    assert found("--correlation-id", "order-8") == set()


@pytest.mark.parametrize("bad", [("--state", "lost"), ("--limit", "0"), ("--queue", "a b"), ("--task", "")])
def test_filters_that_cannot_be_are_bad_usage(shop: Shop, bad: tuple[str, str]) -> None:
    assert run("jobs", "list", *bad, store=shop.url).exit_code == 2


def test_json_has_an_object_per_line_with_keys_to_rely_on(shop: Shop) -> None:
    shop.kill(1, correlation_id="order-7")
    [record] = records(run("jobs", "list", "--json", store=shop.url))
    assert set(record) == LISTED
    assert (record["state"], record["reason"], record["correlation_id"]) == ("failed", "permanent", "order-7")
    assert record["error"] == "ValueError: broken"
    assert all(ISO_8601.fullmatch(record[name]) for name in ("created_at", "run_at", "claimed_at", "ended_at"))


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_pages_are_walked_up_to_the_limit(shop: Shop, form: tuple[str, ...]) -> None:
    ids = shop.add(10)
    result = run("jobs", "list", "--limit", "7", *form, store=shop.url)
    listed = re.findall(r"[0-9a-f-]{36}", result.stdout)
    assert listed == list(reversed(ids))[:7]
    assert result.stderr == "the newest 7; --limit shows more\n"


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("limit", ["9", "10", "1000"])
def test_nothing_is_said_about_more_if_there_is_none(shop: Shop, limit: str) -> None:
    shop.add(9)
    result = run("jobs", "list", "--json", "--limit", limit, store=shop.url)
    assert len(result.stdout.splitlines()) == 9
    assert result.stderr == ""


def test_fifty_are_listed_unless_told_otherwise(shop: Shop) -> None:
    shop.add(51)
    assert len(records(run("jobs", "list", "--json", store=shop.url))) == 50


def test_a_page_may_be_empty_though_there_are_more(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = shop.add(4)
    whole = Holdfast.afind
    cursors: list[str | None] = []

    async def sparse(app: Holdfast, **query: Any) -> JobPage:
        """As a store that filters after reading: every other page is empty."""
        cursors.append(query["cursor"])
        if len(cursors) % 2:
            return JobPage((), query["cursor"] or "f" * 36)
        return await whole(app, **(query | {"limit": 1}))

    monkeypatch.setattr(Holdfast, "afind", sparse)
    assert [record["id"] for record in records(run("jobs", "list", "--json", store=shop.url))] == ids[::-1]


def test_notes_say_what_each_job_waits_for(shop: Shop) -> None:
    shop.add(1, queue="later", delay=3_600_000_000)
    shop.add(1, queue="running")
    shop.add(1, queue="retried")
    shop.claim(queue="running")
    shop.settle(shop.claim(queue="retried"), Failed(failure("too slow")))
    notes = {line.split()[2]: line for line in run("jobs", "list", store=shop.url).stdout.splitlines()}
    assert re.search(r"due in (1 h|59 min)$", notes["later"])
    assert "running for 0 s" in notes["running"]
    assert "retried, due" in notes["retried"]
    assert notes["retried"].endswith("ValueError: too slow")


# Showing.


def test_show_tells_everything(shop: Shop) -> None:
    [job_id] = shop.kill(1, correlation_id="order-7", key=key("once"))
    result = run("jobs", "show", job_id, store=shop.url)
    assert result.exit_code == 0
    fields = dict(re.split(r"  +", line, maxsplit=1) for line in result.stdout.split("\n\n")[0].splitlines())
    assert fields["id"] == job_id
    assert fields["state"] == "failed"
    assert fields["reason"] == "permanent"
    assert fields["attempts"] == "1, failures 1 of at most 4"
    assert fields["correlation id"] == "order-7"
    assert fields["key"] == "once"
    assert ISO_8601.match(fields["ended"])
    assert "attempt 1: " in result.stdout
    assert '  File "shop.py", line 7, in resize\n' in result.stdout


def test_show_has_the_result_and_the_progress(shop: Shop) -> None:
    [job_id] = shop.add()
    [job] = shop.claim()
    shop.use(lambda store: store.note(job.lease, b'{"done":3}'))
    assert 'progress  {"done": 3}' in run("jobs", "show", job_id, store=shop.url).stdout
    shop.settle([job], Succeeded(b'{"width":640}'))
    [record] = records(run("jobs", "show", job_id, "--json", store=shop.url))
    assert (record["progress"], record["result"]) == ({"done": 3}, {"width": 640})


def test_json_of_one_job_is_one_object_with_keys_to_rely_on(shop: Shop) -> None:
    [job_id] = shop.kill()
    [record] = records(run("jobs", "show", job_id, "--json", store=shop.url))
    assert set(record) == SHOWN
    [failed] = record["failure_history"]
    assert set(failed) == {"at", "attempt", "type", "message", "traceback"}
    assert ISO_8601.fullmatch(failed["at"])
    assert record["retention"] == 7 * 24 * 3600


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_payload_is_only_shown_when_asked_for(shop: Shop, form: tuple[str, ...]) -> None:
    [job_id] = shop.kill()
    for command in (("jobs", "list"), ("dead", "list"), ("jobs", "show", job_id), ("dead", "show", job_id)):
        result = run(*command, *form, store=shop.url)
        assert result.exit_code == 0
        assert SECRET not in result.output
    for group in ("jobs", "dead"):
        assert SECRET in run(group, "show", job_id, "--payload", *form, store=shop.url).stdout


def test_a_job_that_is_not_there_is_a_failure(shop: Shop) -> None:
    result = run("jobs", "show", "0195-nowhere", store=shop.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("holdfast: there is no job '0195-nowhere'")
    assert result.stderr.count("\n") == 1


def test_a_payload_that_is_no_json_is_shown_as_it_is(shop: Shop) -> None:
    [job_id] = shop.add(1, payload=b'{"torn\xff')
    [record] = records(run("jobs", "show", job_id, "--payload", "--json", store=shop.url))
    assert record["payload"] == '{"torn\\xff'


# Foreign text.


@pytest.mark.parametrize("command", [("jobs", "list"), ("dead", "list"), ("jobs", "show"), ("dead", "show")])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_text_of_jobs_can_do_nothing_to_a_terminal_or_a_table(
    shop: Shop, command: tuple[str, str], form: tuple[str, ...]
) -> None:
    [job_id] = shop.kill(1, message=HOSTILE, correlation_id="[bold]\x9b\u202e")
    arguments = [*command, job_id] if command[1] == "show" else [*command]
    result = run(*arguments, "--payload", *form, store=shop.url) if command[1] == "show" else run(
        *arguments, *form, store=shop.url
    )  # fmt: skip
    assert result.exit_code == 0
    assert {char for char in result.output if not char.isprintable()} == {"\n"}
    assert "[red]gone[/red]" in result.stdout
    if form or command[1] == "list":
        assert len(result.stdout.splitlines()) == (1 if form else 2)


# Cancelling.


def test_a_waiting_job_is_cancelled_at_once(shop: Shop) -> None:
    [job_id] = shop.add()
    result = run("jobs", "cancel", job_id, store=shop.url)
    assert (result.exit_code, result.stdout) == (0, f"{job_id} cancelled\n")
    assert shop.states([job_id]) == [State.CANCELLED]


def test_a_running_job_is_asked_to_stop(shop: Shop) -> None:
    [job_id] = shop.add()
    shop.claim()
    result = run("jobs", "cancel", job_id, store=shop.url)
    assert result.exit_code == 0
    assert "asked to stop" in result.stdout
    job = shop.get(job_id)
    assert job is not None
    assert job.cancel_asked
    assert "asked to stop" in run("jobs", "list", store=shop.url).stdout


def test_what_cannot_be_cancelled_does_not_stop_the_others(shop: Shop) -> None:
    done = shop.finish()
    [waiting] = shop.add()
    result = run("jobs", "cancel", "nowhere", done, waiting, store=shop.url)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "nowhere: there is no job 'nowhere' to cancel",
        f"{done}: it has ended already",
    ]
    assert shop.states([done, waiting]) == [State.SUCCEEDED, State.CANCELLED]
