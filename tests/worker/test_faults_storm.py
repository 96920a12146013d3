"""Worker processes are killed one after another, at random moments, and at last all of them with their supervisor.

The promise: every job ends, none is lost, and a job only ever runs again because the process that ran it was killed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from pathlib import Path

from tests.worker.programs import DEADLINE, Entry, World, eventually, is_alive

KILLS = 15
JOBS = 1500


def test_no_job_is_lost_while_processes_are_killed_at_random(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    killed: set[int] = set()
    with World(tmp_path) as world:
        supervisor = world.supervisor(processes=3, concurrency=4)
        tasks = ("linger", "note_in_thread", "linger")
        jobs = world.enqueue_all(
            (task, {"seconds": chance.random() / 50} if task == "linger" else {"number": number})
            for number in range(JOBS)
            for task in [chance.choice(tasks)]
        )
        while len(killed) < KILLS:
            ended = world.count("succeeded")
            wanted = ended + chance.randrange(JOBS // KILLS // 2)
            eventually(lambda wanted=wanted: world.count("succeeded") >= min(wanted, JOBS), "they go on")  # type: ignore[misc]
            living = [pid for pid in world.open_sessions().values() if is_alive(pid)]
            if living:
                victim = chance.choice(living)
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
        # All at once, and start again: only the TTL brings back what they held.
        everybody = [supervisor.pid, *world.open_sessions().values()]
        for pid in everybody:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        killed.update(everybody)
        supervisor.exit_code()
        began = time.monotonic()
        world.supervisor(processes=2, concurrency=4)
        rows = world.wait_for_end(*jobs, seconds=2 * DEADLINE)
        print(f"the rest took {time.monotonic() - began:.1f} s")

        assert {row.state for row in rows} == {"succeeded"}
        assert world.count("ready") == world.count("in_flight") == 0
        runs: dict[str, list[Entry]] = defaultdict(list)
        for entry in world.entries():
            runs[entry.job].append(entry)
        assert set(runs) == set(jobs)
        again = [entries for entries in runs.values() if len(entries) > 1]
        # A process in which a job runs alone is killed with the worker that started it.
        unexplained = [
            entry
            for entries in again
            for entry in entries[:-1]
            if entry.pid not in killed and entry.parent not in killed
        ]
        print(f"{len(killed)} processes killed, {len(again)} of {JOBS} jobs ran more than once")
        assert unexplained == []
        assert {row.failures for row in rows} == {0}  # no handler is to blame
