"""Why a move was refused: judged from the job as the server found it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.job import JobId
from holdfast.lifecycle import Applied, Move, Standing, judge
from holdfast.stores.rows import reason_of, state_of


def judge_refused(verdicts: dict[JobId, Applied], moves: Sequence[Move], rows: Sequence[Sequence[Any]]) -> None:
    """The verdicts on those of the moves that are among the rows, which a settlement answered with."""
    if rows:
        refused = {row[0]: row for row in rows}
        for move in moves:
            if move.job_id in refused:
                judge_again(verdicts, move, refused[move.job_id])


def judge_again(verdicts: dict[JobId, Applied], move: Move, row: Sequence[Any]) -> None:
    """The verdict on a move that was refused, from the job as it is now; none if its guard holds now."""
    standing = None
    if row[1] is not None:
        standing = Standing(state_of(row[1]), reason_of(row[2]), *row[3:])
    verdict = judge(move, standing)
    if verdict is Applied.APPLIED:
        verdicts.pop(move.job_id, None)
    else:
        verdicts[move.job_id] = verdict
