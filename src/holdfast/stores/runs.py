"""A batch of moves: cut where a later one must see what an earlier one did, and which of them are the usual ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.job import JobId, State
from holdfast.lifecycle import KeyChange, Move

_HELD = frozenset({State.IN_FLIGHT})
_TAKEN_AND_FREED = {KeyChange.TAKE, KeyChange.FREE}


def runs_of_distinct_jobs(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """The moves in order, in pieces that each may be carried out at once. No piece is empty."""
    piece: dict[JobId, Move] = {}
    keys = KeyChange.KEEP
    for move in moves:
        # A later move of the same job must see what the earlier one did; one that takes a key, what is free by then.
        if move.job_id in piece or {keys, move.key_change} == _TAKEN_AND_FREED:
            yield list(piece.values())
            piece, keys = {}, KeyChange.KEEP
        piece[move.job_id] = move
        if move.key_change is not KeyChange.KEEP:
            keys = move.key_change
        if move.then:  # and a later move may be about one of the jobs that follow
            yield list(piece.values())
            piece, keys = {}, KeyChange.KEEP
    if piece:
        yield list(piece.values())


def ends_well(move: Move) -> bool:
    """Whether the move ends a job well for an open session that holds it, and is about nothing else.

    Then its guard is the lease alone, which an engine can compare for many such moves at once.
    """
    return (
        move.to is State.SUCCEEDED
        and move.sources == _HELD
        and move.session_open is True
        and move.session_id is not None
        and move.despite_cancel
        and not move.raise_version
        and move.key_change is KeyChange.KEEP
        and not move.then
    )
