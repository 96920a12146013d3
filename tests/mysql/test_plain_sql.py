"""INSERT INTO holdfast_ready (task, payload) is a valid enqueue, and a bad row is refused with a clear text."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pymysql
import pytest

from holdfast.job import NewJob
from holdfast.stores.mysql import MysqlStore
from tests.mysql.conftest import NAMESPACE
from tests.mysql.helpers import claim, connect, done, new_job, open_session, sql

READY = f"{NAMESPACE}_ready"


async def test_a_plain_insert_is_an_enqueue(store: MysqlStore, url: str) -> None:
    before = await store.now()
    sql(url, f"INSERT INTO {READY} (task, payload) VALUES ('mail.welcome', '{{\"user\": 1}}')")
    after = await store.now()
    await open_session(store)
    [job] = await claim(store)
    plain = NewJob(id=job.id, task="mail.welcome", payload=b'{"user": 1}')
    for field in ("task", "payload", "task_version", "queue", "share", "priority", "max_retries", "retention", "key"):
        assert getattr(job, field) == getattr(plain, field), field
    assert before <= job.created_at == job.run_at <= after
    assert (job.attempt, job.version, job.failure_history, job.correlation_id) == (0, 1, b"", None)
    made = uuid.UUID(job.id)
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == job.created_at // 1000
    assert await store.apply(done([job])) == ["applied"]


async def test_every_column_can_be_given(store: MysqlStore, url: str) -> None:
    given = new_job()
    due = await store.now() + 3_600_000_000
    sql(
        url,
        f"INSERT INTO {READY} (id, task, payload, task_version, queue, share, priority, run_at, max_retries, "
        f"retention, correlation_id) VALUES (%s, 't', '{{}}', '2', 'mail', 'größe', -7, %s, 0, 5000000, 'c')",
        given.id,
        due,
    )
    job = await store.get(given.id)
    assert job is not None
    assert (job.task_version, job.queue, job.share, job.priority) == ("2", "mail", "größe", -7)
    assert (job.run_at, job.max_retries, job.retention, job.correlation_id) == (due, 0, 5_000_000, "c")


async def test_rows_keep_their_order(store: MysqlStore, url: str) -> None:
    rows = ", ".join(f"('t', '{{\"n\": {number}}}')" for number in range(200))
    sql(url, f"INSERT INTO {READY} (task, payload) VALUES {rows}")
    await open_session(store)
    jobs = await claim(store, limit=300)
    assert [job.payload for job in jobs] == [b'{"n": %d}' % number for number in range(200)]
    assert len({job.id for job in jobs}) == 200


async def test_an_old_date_does_not_overtake(store: MysqlStore, url: str) -> None:
    first = new_job()
    await store.insert([first])
    sql(url, f"INSERT INTO {READY} (task, payload, run_at) VALUES ('t', '{{}}', 1)")
    await open_session(store)
    assert [job.id == first.id for job in await claim(store)] == [True, False]


async def test_it_follows_the_transaction(store: MysqlStore, url: str) -> None:
    with connect(url, autocommit=False) as connection, connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {READY} (task, payload) VALUES ('t', '{{}}')")
        assert await store.counts() == []
        connection.rollback()
        cursor.execute(f"INSERT INTO {READY} (task, payload) VALUES ('t', '{{}}')")
        connection.commit()
    assert [count.ready for count in await store.counts()] == [1]


@pytest.mark.parametrize("zone", ["+00:00", "-11:00", "+13:00"])
async def test_the_time_zone_of_the_session_does_not_matter(store: MysqlStore, url: str, zone: str) -> None:
    with connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION time_zone = %s", (zone,))
        cursor.execute(f"INSERT INTO {READY} (task, payload) VALUES ('t', '{{}}')")
    await open_session(store)
    assert len(await claim(store)) == 1


@pytest.mark.parametrize(
    ("columns", "values"),
    [
        ("task, payload", ("", "{}")),
        ("task, payload", ("with blank", "{}")),
        ("task, payload", ("-x", "{}")),
        ("task, payload", ("x" * 129, "{}")),
        ("task, payload", ("with\nline", "{}")),
        ("task, payload, queue", ("t", "{}", "grüße")),
        ("task, payload, queue", ("t", "{}", ".hidden")),
        ("task, payload, task_version", ("t", "{}", "a b")),
        ("task, payload, priority", ("t", "{}", 101)),
        ("task, payload, priority", ("t", "{}", -101)),
        ("task, payload, max_retries", ("t", "{}", 1001)),
        ("task, payload, max_retries", ("t", "{}", -1)),
        ("task, payload, run_at", ("t", "{}", -1)),
        ("task, payload, run_at", ("t", "{}", 2**53)),
        ("task, payload, retention", ("t", "{}", -1)),
        ("task, payload, share", ("t", "{}", "s" * 129)),
        ("task, payload, share", ("t", "{}", b"\xff")),
        ("task, payload, correlation_id", ("t", "{}", "c" * 257)),
        ("task, payload, `key`", ("t", "{}", "k")),
        ("task, payload, id", ("t", "{}", "nonsense")),
        ("task, payload, id", ("t", "{}", "0190F3C1-0000-7000-8000-000000000000")),
        ("task, payload", ("t", "")),
        ("task, payload", ("t", "{")),
        ("task, payload", ("t", "[1]")),
        ("task, payload", ("t", '"text"')),
        ("task, payload", ("t", "null")),
        ("task, payload", ("t", b'{"a": "\xff"}')),
        ("task, payload", ("t", '{"a": "%s"}' % ("x" * 262144))),
    ],
)
async def test_a_bad_row_is_refused(store: MysqlStore, url: str, columns: str, values: tuple[Any, ...]) -> None:
    marks = ", ".join(["%s"] * len(values))
    with pytest.raises(pymysql.MySQLError) as refused:
        sql(url, f"INSERT INTO {READY} ({columns}) VALUES ({marks})", *values)
    text = str(refused.value.args[1])
    # What the column itself cannot hold, the server refuses before anybody is asked.
    assert text.startswith("holdfast: ") or "incorrect string value" in text.lower(), text
    assert await store.counts() == []


async def test_an_id_that_was_there_is_refused(store: MysqlStore, url: str) -> None:
    jobs = [new_job(), new_job(), new_job()]
    await store.insert(jobs)
    await open_session(store)
    claimed = await claim(store, limit=2)
    await store.apply(done(claimed[:1]))
    for job in jobs:
        with pytest.raises(pymysql.MySQLError, match=r"holdfast: a job with this id was there before|Duplicate entry"):
            sql(url, f"INSERT INTO {READY} (id, task, payload) VALUES (%s, 't', '{{}}')", job.id)


async def test_nulls_mean_the_defaults(store: MysqlStore, url: str) -> None:
    sql(
        url,
        f"INSERT INTO {READY} (task, payload, queue, priority, share, run_at, max_retries, retention, task_version) "
        f"VALUES ('t', '{{}}', NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
    )
    await open_session(store)
    [job] = await claim(store)
    assert (job.queue, job.priority, job.share, job.max_retries) == ("default", 5, "", 3)


def test_the_texts_say_holdfast() -> None:
    from holdfast.stores.mysql.migrate import shipped

    texts = re.findall(r"MESSAGE_TEXT =\s*'([^']*)'", shipped()[0].text)
    assert len(texts) >= 10
    assert all(text.startswith("holdfast: ") and len(text) <= 128 for text in texts)
