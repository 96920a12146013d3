"""The writing thread: nobody waits for it, nothing grows without bound, and what is missing is said."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.observe import writer as module
from holdfast.observe.writer import Outlet, Writer
from holdfast.ports import SYSTEM, SystemSpawner
from tests.observe.samples import Failing, Held

SOON = 10


def writing(stream: io.TextIOBase, limit: int = 3) -> Writer:
    """A writer whose confession is a line such as `missing 2`."""
    outlet = Outlet(stream)  # type: ignore[arg-type]
    return Writer(outlet, confess=lambda count: outlet.write(f"missing {count}"), spawner=SYSTEM.spawner, limit=limit)


def written(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_lines_are_written_in_order_and_close_waits_for_them() -> None:
    stream = io.StringIO()
    writer = writing(stream, limit=1000)
    for number in range(500):
        writer.write(str(number))
    writer.close()
    assert written(stream) == [str(number) for number in range(500)]
    assert writer.dropped == 0


def test_a_stream_that_blocks_costs_lines_and_no_time() -> None:
    stream = Held()
    writer = writing(stream, limit=3)
    writer.write("blocked")
    assert stream.reached.wait(SOON)
    for line in ("a", "b", "c", "d", "e"):
        writer.write(line)  # a call that blocked would never come back: nobody else lets the stream go
    assert writer.dropped == 2
    stream.let_go.set()
    writer.close()
    assert written(stream) == ["blocked", "a", "b", "c", "missing 2"]


def test_without_the_limit_nothing_would_be_dropped() -> None:
    stream = Held()
    writer = writing(stream, limit=1000)
    for line in ("blocked", "a", "b", "c", "d", "e"):
        writer.write(line)
    stream.let_go.set()
    writer.close()
    assert (written(stream), writer.dropped) == (["blocked", "a", "b", "c", "d", "e"], 0)


def test_what_is_missing_is_said_once_and_counted_anew() -> None:
    stream = Held()
    writer = writing(stream, limit=1)
    said = threading.Event()

    def confess(count: int) -> None:
        Outlet(stream).write(f"missing {count}")
        said.set()

    writer._confess = confess
    for _ in range(2):
        stream.let_go.clear()
        stream.reached.clear()
        writer.write("blocked")
        assert stream.reached.wait(SOON)
        for line in ("a", "b", "c"):
            writer.write(line)
        said.clear()
        stream.let_go.set()
        assert said.wait(SOON)
    writer.close()
    assert written(stream) == ["blocked", "a", "missing 2"] * 2
    assert writer.dropped == 4


def test_an_overload_that_never_ends_is_mentioned_now_and_then() -> None:
    class Flooded(io.StringIO):
        """While a line is written, three more come."""

        def write(self, text: str) -> int:
            if len(written(self)) >= 100:
                over.set()
            elif not text.startswith("missing"):
                for _ in range(3):
                    writer.write("more")
            return super().write(text)

    over = threading.Event()
    stream = Flooded()
    writer = writing(stream, limit=10)
    writer.write("first")
    assert over.wait(SOON)
    writer.close()
    lines = written(stream)
    confessions = [line for line in lines if line.startswith("missing")]
    assert 5 <= len(confessions) <= 11
    assert sum(int(line.split()[1]) for line in confessions) == writer.dropped


def test_a_stream_that_fails_costs_the_line_and_nothing_else() -> None:
    stream = Failing(2)
    writer = writing(stream, limit=100)
    for line in ("a", "b", "c", "d"):
        writer.write(line)
    writer.close()
    assert writer.dropped == 2
    assert sorted(written(stream)) == ["c", "d", "missing 2"]


def test_a_stream_that_always_fails_harms_nobody() -> None:
    writer = writing(Failing(10**9), limit=1000)
    for _ in range(100):
        writer.write("line")
    writer.close()
    assert writer.dropped == 100


def test_a_closed_stream_harms_nobody() -> None:
    stream = io.StringIO()
    stream.close()
    writer = writing(stream)
    writer.write("line")
    writer.close()
    assert writer.dropped == 1


def test_many_threads_lose_no_count() -> None:
    stream = Held()
    writer = writing(stream, limit=100)
    writer.write("blocked")
    assert stream.reached.wait(SOON)

    def write_many() -> None:
        for _ in range(1000):
            writer.write("x")

    threads = [SYSTEM.spawner.thread(write_many, "many") for _ in range(8)]
    for thread in threads:
        thread.join(SOON)
    stream.let_go.set()
    writer.close()
    lines = written(stream)
    assert lines.count("x") + writer.dropped == 8000
    assert 100 <= lines.count("x") <= 108  # each thread may find the last place free
    assert [line for line in lines if line.startswith("missing")] == [f"missing {writer.dropped}"]


# Closing.


def test_closing_does_not_wait_for_a_stream_that_blocks_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_WORDS", 0.01)
    stream = Held()
    writer = writing(stream)
    writer.write("blocked")
    assert stream.reached.wait(SOON)
    writer.close()
    assert written(stream) == []
    stream.let_go.set()


def test_a_line_after_the_end_is_dropped_and_closing_twice_is_harmless() -> None:
    stream = io.StringIO()
    writer = writing(stream)
    writer.write("line")
    writer.close()
    writer.close()
    writer.write("late")
    assert (written(stream), writer.dropped) == (["line"], 1)


def test_a_writer_that_wrote_nothing_has_no_thread() -> None:
    writer = writing(io.StringIO())
    writer.close()
    assert writer._thread is None


def test_no_thread_to_be_had_costs_the_line_and_nothing_else() -> None:
    class NoMore(SystemSpawner):
        def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
            raise RuntimeError("can't start new thread")

    writer = Writer(Outlet(io.StringIO()), confess=lambda count: None, spawner=NoMore())
    writer.write("line")
    writer.close()
    assert writer.dropped == 1


# The stream.


def test_what_the_stream_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    writer = writing(io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    writer.write("Größe … 🙂")
    writer.close()
    assert raw.getvalue() == rb"Gr\xf6\xdfe \u2026 \U0001f642" + b"\n"
    assert writer.dropped == 0


def test_each_line_is_one_write_and_flushed() -> None:
    calls: list[str] = []

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            calls.append(text)
            return super().write(text)

        def flush(self) -> None:
            calls.append("flush")

    writer = writing(Watched(), limit=100)
    writer.write("a")
    writer.write("b")
    writer.close()
    assert calls == ["a\n", "flush", "b\n", "flush"]


# On Python 3.12 and later a fork beside threads warns, and still is what servers that preload do.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_writes_with_a_thread_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("a", encoding="utf-8") as stream:
        writer = writing(stream)
        writer.write("parent")
        with writer._lock:  # as another thread would hold it at the moment of the fork
            child = os.fork()
            if child == 0:
                signal.alarm(SOON)
                try:
                    writer.write("child")
                    writer.close()
                    os._exit(0 if writer.dropped == 0 else 2)
                finally:
                    os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.write("parent again")
        writer.close()
    assert sorted(path.read_text(encoding="utf-8").splitlines()) == ["child", "parent", "parent again"]
