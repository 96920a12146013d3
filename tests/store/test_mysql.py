"""The MySQL store passes the conformance suite: on a MariaDB of its own, and on a MySQL whose URL is given."""

from __future__ import annotations

import os

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness
from tests.mysql.helpers import empty
from tests.store.harnesses import MysqlHarness

MYSQL = os.environ.get("HOLDFAST_TEST_MYSQL")


@pytest.fixture(params=["mariadb", *(["mysql"] if MYSQL else [])])
def harness(request: pytest.FixtureRequest) -> Harness:
    url = MYSQL or "" if request.param == "mysql" else request.getfixturevalue("mariadb_server").url
    empty(url, "suite")
    return MysqlHarness(url, "suite")
