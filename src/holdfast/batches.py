"""The calls of one `enqueue_many`: prepared one by one, cut into what goes into one insert, and what became of each.

While the store has one chunk, the next is prepared: that is the half of the work that needs no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NoReturn, TypeVar

import msgspec

from holdfast.codec import Signature
from holdfast.errors import HoldfastError, InvalidOption, PartlyRefused, shown
from holdfast.job import NewJob
from holdfast.store import MOST_BYTES_PER_CALL, MOST_PER_CALL

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
H = TypeVar("H")


class PreparedJob(msgspec.Struct, Generic[R_co], frozen=True):
    """One call of a task, ready to be stored by `enqueue_many`."""

    new: NewJob
    signature: Signature


class Batch(Generic[R, H]):
    """The calls of one `enqueue_many`, cut into chunks, and what became of them."""

    def __init__(self, calls: Iterable[PreparedJob[R]], progress: Callable[[int], object] | None = None) -> None:
        """`progress`: told after each insert how many jobs are stored. With it, no handle is kept."""
        if not isinstance(calls, Iterable):
            raise InvalidOption(f"enqueue_many takes an iterable of task.job(...), not {shown(calls)}")
        self._calls = iter(calls)
        self._progress = progress
        self._left_over: PreparedJob[R] | None = None
        self._ahead: list[PreparedJob[R]] | None = None
        self._reading_failed: Exception | None = None
        self._at_end = False
        self._handles: list[H] = []
        self._refused: dict[int, HoldfastError] = {}
        self._position = 0
        self._stored = 0

    def next_chunk(self) -> list[PreparedJob[R]]:
        """As many of the next calls as go into one insert; none at the end."""
        self.read_ahead()
        if self._reading_failed is not None:
            self.stop(self._reading_failed)
        chunk, self._ahead = self._ahead, None
        return chunk or []

    def read_ahead(self) -> None:
        """Prepare what `next_chunk` will answer, once. If the iterable fails, that is where it will be raised."""
        if self._ahead is None and self._reading_failed is None:
            try:
                self._ahead = self._read_chunk()
            except Exception as error:
                self._reading_failed = error

    @property
    def at_end(self) -> bool:
        """Whether the iterable is known to have no more calls."""
        return self._at_end

    def _read_chunk(self) -> list[PreparedJob[R]]:
        chunk: list[PreparedJob[R]] = []
        if self._at_end:
            return chunk
        size = 0
        if self._left_over is not None:
            chunk.append(self._left_over)
            size = len(self._left_over.new.payload)
            self._left_over = None
        for call in self._calls:
            if not isinstance(call, PreparedJob):
                raise InvalidOption(f"enqueue_many takes what task.job(...) returns, not {shown(call)}")
            size += len(call.new.payload)
            if size > MOST_BYTES_PER_CALL and chunk:
                self._left_over = call
                return chunk
            chunk.append(call)
            if len(chunk) == MOST_PER_CALL:
                return chunk
        self._at_end = True
        return chunk

    @property
    def keeps_handles(self) -> bool:
        """Whether anybody will ask for the handles."""
        return self._progress is None

    def add_stored(self, number: int) -> None:
        """Count so many calls of a chunk that were all accepted, and of which nothing is kept."""
        self._stored += number
        self._position += number
        self._tell_progress()

    def add(self, results: Iterable[H | HoldfastError]) -> None:
        """Keep what became of a chunk."""
        for result in results:
            if isinstance(result, HoldfastError):
                self._refused[self._position] = result
            else:
                self._stored += 1
                if self._progress is None:
                    self._handles.append(result)
            self._position += 1
        self._tell_progress()

    def _tell_progress(self) -> None:
        if self._progress is not None:
            try:
                self._progress(self._stored)
            except Exception as error:
                self.stop(error)
            if len(self._refused) > MOST_PER_CALL:  # nobody reads more, and they must not fill the memory
                self.stop(next(reversed(self._refused.values())))

    def stop(self, error: Exception) -> NoReturn:
        """Raise the error itself if nothing has been tried, else say what is stored and where it stopped."""
        if not self._position:
            raise error
        raise self._partly_refused(stopped_by=error) from error

    def handles(self) -> list[H]:
        """The handles, if every call was accepted."""
        self.number()
        return self._handles

    def number(self) -> int:
        """How many jobs there were, if every one was accepted."""
        if self._refused:
            raise self._partly_refused()
        return self._stored

    def _partly_refused(self, stopped_by: Exception | None = None) -> PartlyRefused:
        return PartlyRefused(
            self._handles,
            self._refused,
            stored=self._stored,
            stopped_at=None if stopped_by is None else self._position,
            stopped_by=stopped_by,
        )
