"""The guide: its code blocks are files, and together they are a project whose tests pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "testing.md"
FILE = re.compile(r"^```\w+\n# (?P<name>[\w/]+\.\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_guide_is_a_project_whose_tests_pass(pytester: pytest.Pytester) -> None:
    files = {found["name"]: found["text"] for found in FILE.finditer(GUIDE.read_text(encoding="utf-8"))}
    assert {"pytest.ini", "shop/jobs.py", "shop/users.py", "test_without_pytest.py"} <= files.keys()
    for name, text in files.items():
        path = pytester.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    expected = sum(len(re.findall(r"def test_", text)) for text in files.values())
    assert expected > 15
    # A process of its own: the guide's package is called `shop`, and others' may be imported here by that name.
    asyncio = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    result = pytester.runpytest_subprocess(*asyncio, "-W", "error", timeout=60)
    result.assert_outcomes(passed=expected)
