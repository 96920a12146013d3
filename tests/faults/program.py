"""The application of these tests: that of `tests.worker`, and a handler that writes to the server itself."""

from __future__ import annotations

import os
import threading
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pymysql

from holdfast import current
from tests.servers import redis_command
from tests.worker.program import app

_server = urlsplit(os.environ["HOLDFAST_TEST_STORE"])
_own = threading.local()


def _connection() -> Any:
    """A connection of this thread's own, which the queue knows nothing of."""
    if not hasattr(_own, "connection"):
        if _server.scheme == "mysql":
            _own.connection = pymysql.connect(
                host=_server.hostname,
                port=_server.port or 0,
                user=_server.username,
                database=_server.path.strip("/"),
                autocommit=True,
            )
        else:
            _own.connection = psycopg.connect(_server._replace(query="").geturl(), autocommit=True)
    return _own.connection


@app.task
def record(number: int = 0) -> None:
    """Work for a moment, and add a row to the table `job_results`, or an element to the list."""
    time.sleep(0.005)
    if _server.scheme == "redis":
        namespace = parse_qs(_server.query)["namespace"][0]
        redis_command(_server.port or 0, "RPUSH", f"{namespace}:job_results", f"{number} {current().id}")
        return
    statement = "INSERT INTO job_results (job_id, number) VALUES (%s, %s)"
    _connection().cursor().execute(statement, (current().id, number))


__all__ = ["app", "record"]
