"""The calls of one `enqueue_many`: prepared one by one, cut into what goes into one insert, and what became of each."""

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
        self._handles: list[H] = []
        self._refused: dict[int, HoldfastError] = {}
        self._position = 0
        self._stored = 0

    def next_chunk(self) -> list[PreparedJob[R]]:
        """As many of the next calls as go into one insert; none at the end."""
        chunk: list[PreparedJob[R]] = []
        size = 0
        while len(chunk) < MOST_PER_CALL:
            call = self._left_over or self._read()
            self._left_over = None
            if call is None:
                break
            if chunk and size + len(call.new.payload) > MOST_BYTES_PER_CALL:
                self._left_over = call
                break
            chunk.append(call)
            size += len(call.new.payload)
        return chunk

    def _read(self) -> PreparedJob[R] | None:
        try:
            call = next(self._calls, None)
            if call is not None and not isinstance(call, PreparedJob):
                raise InvalidOption(f"enqueue_many takes what task.job(...) returns, not {shown(call)}")
            return call
        except Exception as error:
            self.stop(error)

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
