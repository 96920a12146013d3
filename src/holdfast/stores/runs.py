"""A batch of moves, cut where a later move must see what an earlier one did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.job import JobId
from holdfast.lifecycle import Move


def runs_of_distinct_jobs(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """The moves in order, in pieces that each may be carried out at once. No piece is empty."""
    piece: dict[JobId, Move] = {}
    for move in moves:
        if move.job_id in piece:  # a later move of the same job must see what the earlier one did
            yield list(piece.values())
            piece = {}
        piece[move.job_id] = move
        if move.then:  # and a later move may be about one of the jobs that follow
            yield list(piece.values())
            piece = {}
    if piece:
        yield list(piece.values())
