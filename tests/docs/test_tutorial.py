"""The tutorial, followed to the letter: its files are written, its commands are run, and what it promises happens."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TUTORIAL, re.DOTALL)


def holdfast(line: str) -> list[str]:
    program, *arguments = shlex.split(line)
    assert program == "holdfast"
    return [sys.executable, "-m", "holdfast.cli", *arguments]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(blocks("python")[0], encoding="utf-8")
    return tmp_path


@pytest.fixture
def worker(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    [line] = [block for block in blocks("sh") if "holdfast worker " in block]
    with subprocess.Popen(holdfast(line), cwd=folder, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(30)


def run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_tutorial_does_what_it_says(folder: Path, worker: subprocess.Popen[bytes]) -> None:
    enqueue, stats = blocks("sh")[0].splitlines()
    job_id = run(holdfast(enqueue), folder).strip()
    assert "mail" in run(holdfast(stats), folder)

    script = blocks("python")[1]
    assert run([sys.executable, "-c", script], folder).splitlines() == [
        "de: welcome, user 42",
        "30",
        "sent at the second attempt",
    ]

    with Holdfast(f"sqlite:///{folder / 'shop.db'}") as app:
        assert app.get(job_id).result(timeout=30) == "en: welcome, user 42"
    for line in [line for block in blocks("sh")[2:] for line in block.splitlines() if "replay" not in line]:
        run(holdfast(line), folder)
    run(holdfast(f"holdfast jobs show {job_id} --store sqlite:///shop.db"), folder)

    worker.send_signal(signal.SIGINT)
    assert worker.wait(30) == 0
