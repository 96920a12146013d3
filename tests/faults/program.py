"""The application of these tests: that of `tests.worker`, and handlers that write to the server themselves."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import psycopg
import pymysql

from holdfast import current
from tests.worker.program import app, write_down

_server = urlsplit(os.environ["HOLDFAST_TEST_STORE"])


@app.task
def record(number: int = 0) -> None:
    """Add a row to the table `job_results`, on a connection of its own, as a handler would that knows no queue."""
    statement, values = "INSERT INTO job_results (job_id, number) VALUES (%s, %s)", (current().id, number)
    if _server.scheme == "mysql":
        with pymysql.connect(
            host=_server.hostname,
            port=_server.port or 0,
            user=_server.username,
            database=_server.path.strip("/"),
            autocommit=True,
        ) as connection:
            connection.cursor().execute(statement, values)
    else:
        with psycopg.connect(_server._replace(query="").geturl(), autocommit=True) as other:
            other.execute(statement, values)


__all__ = ["app", "record", "write_down"]
