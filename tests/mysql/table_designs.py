"""Two ways to keep live jobs in InnoDB, measured: the figures of docs/decisions/0008-mysql-tables.md.

    python -m tests.mysql.table_designs mysql://root@127.0.0.1:3306/test [JOBS]

`moved`: ready and in-flight jobs in two tables, the ready ones clustered by their lane. `in place`: one table clustered
by id, a claim rewrites the row and with it an index over the lanes. Both keep ended jobs in a third table. One client,
every column that an engine needs, 100 and 500 jobs to a claim and to a settlement.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import pymysql
import uuid_utils

REST = """task VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, payload LONGBLOB NOT NULL,
    task_version VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '1',
    created_at BIGINT NOT NULL DEFAULT 0,
    reason VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'enqueued',
    version BIGINT NOT NULL DEFAULT 0,
    session_id VARBINARY(128), attempt INT NOT NULL DEFAULT 0, failures INT NOT NULL DEFAULT 0,
    crashes INT NOT NULL DEFAULT 0, snoozes INT NOT NULL DEFAULT 0, suspect TINYINT NOT NULL DEFAULT 0,
    cancel_asked TINYINT NOT NULL DEFAULT 0, max_retries INT NOT NULL DEFAULT 3, retention BIGINT NOT NULL DEFAULT 0,
    `key` VARBINARY(512), key_hash VARBINARY(64), key_window BIGINT, correlation_id VARBINARY(256), claimed_at BIGINT,
    failure_history LONGBLOB NOT NULL DEFAULT '', progress LONGBLOB"""
LANE = """id CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    queue VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, priority SMALLINT NOT NULL,
    share VARBINARY(128) NOT NULL, run_at BIGINT NOT NULL"""
COPIED = (
    "id, queue, priority, share, run_at, task, payload, task_version, created_at, attempt, failures, crashes, snoozes, "
    "suspect, cancel_asked, max_retries, retention, `key`, key_hash, key_window, correlation_id, "
    "failure_history, progress"
)
ENDED = f"""CREATE TABLE bench_ended ({LANE}, {REST}, state VARCHAR(16), ended_at BIGINT, expires_at BIGINT,
    result LONGBLOB, PRIMARY KEY (id), KEY (state, expires_at)) ENGINE=InnoDB"""
TABLES = {
    "moved": (
        f"""CREATE TABLE bench_ready ({LANE}, {REST}, PRIMARY KEY (queue, priority, share, run_at, id),
            UNIQUE KEY by_id (id)) ENGINE=InnoDB""",
        f"CREATE TABLE bench_flight ({LANE}, {REST}, PRIMARY KEY (id), KEY (session_id)) ENGINE=InnoDB",
    ),
    "in place": (
        f"""CREATE TABLE bench_ready ({LANE}, {REST}, state VARCHAR(16) NOT NULL DEFAULT 'ready', PRIMARY KEY (id),
            KEY (state, queue, priority, share, run_at, id), KEY (state, session_id)) ENGINE=InnoDB""",
    ),
}


def measure(connection: pymysql.Connection[Any], design: str, jobs: int, batch: int) -> tuple[float, float]:
    """Jobs per second: inserted by the thousand, then claimed and settled by the batch."""
    cursor = connection.cursor()
    for table in ("ready", "flight", "ended"):
        cursor.execute(f"DROP TABLE IF EXISTS bench_{table}")
    for statement in (*TABLES[design], ENDED):
        cursor.execute(statement)
    ids = [str(uuid_utils.uuid7()) for _ in range(jobs)]
    started = time.perf_counter()
    for first in range(0, jobs, 1000):
        rows = ",".join(f"('{job_id}','default',5,'',{first},'t',x'7b7d')" for job_id in ids[first : first + 1000])
        cursor.execute(f"INSERT INTO bench_ready (id, queue, priority, share, run_at, task, payload) VALUES {rows}")
        connection.commit()
    filled = time.perf_counter()
    done = 0
    while done < jobs:
        lane = "queue = 'default' AND priority = 5 AND share = ''"
        if design == "in place":
            lane = f"state = 'ready' AND {lane}"
        cursor.execute(
            f"SELECT {COPIED}, version FROM bench_ready WHERE {lane} AND run_at <= 2000000000 ORDER BY run_at, id "
            f"LIMIT {batch} FOR UPDATE SKIP LOCKED"
        )
        claimed = cursor.fetchall()
        among = ",".join(f"'{row[0]}'" for row in claimed)
        if design == "moved":
            cursor.execute(
                f"INSERT INTO bench_flight ({COPIED}, version, session_id, claimed_at) SELECT {COPIED}, version + 1, "
                f"'s', 1 FROM bench_ready FORCE INDEX (by_id) WHERE id IN ({among})"
            )
            cursor.execute(f"DELETE j FROM bench_ready j FORCE INDEX (by_id) WHERE j.id IN ({among})")
        else:
            cursor.execute(
                f"UPDATE bench_ready SET state = 'in_flight', reason = 'claimed', session_id = 's', claimed_at = 1, "
                f"version = version + 1 WHERE id IN ({among})"
            )
        connection.commit()
        table = "bench_flight" if design == "moved" else "bench_ready"
        cursor.execute(f"SELECT id, version, session_id FROM {table} WHERE id IN ({among}) FOR UPDATE")
        cursor.execute(
            f"INSERT INTO bench_ended ({COPIED}, version, state, ended_at) SELECT {COPIED}, version, 'succeeded', 2 "
            f"FROM {table} WHERE id IN ({among})"
        )
        cursor.execute(f"DELETE FROM {table} WHERE id IN ({among})")
        connection.commit()
        done += len(claimed)
    ended = time.perf_counter()
    for table in ("ready", "flight", "ended"):
        cursor.execute(f"DROP TABLE IF EXISTS bench_{table}")
    return jobs / (filled - started), jobs / (ended - filled)


def main() -> None:
    url = urlsplit(sys.argv[1])
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
    connection = pymysql.connect(
        host=url.hostname or "127.0.0.1",
        port=url.port or 3306,
        user=url.username or os.environ.get("USER", "root"),
        password=url.password or "",
        database=url.path.strip("/"),
        init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    )
    for batch in (100, 500):
        for _ in range(2):
            for design in TABLES:
                inserted, drained = measure(connection, design, jobs, batch)
                print(f"{design:>8}, batches of {batch}: insert {inserted:,.0f}/s, claim and settle {drained:,.0f}/s")
    connection.close()


if __name__ == "__main__":
    main()
