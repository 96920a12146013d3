"""Assertions of the machine explain themselves as those of tests do."""

import pytest

pytest.register_assert_rewrite("tests.model.machine")
