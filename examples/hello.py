"""Enqueue some jobs on SQLite and work them off, to see what Holdfast does. `make run` runs this.

The loop at the end is what a worker does, reduced to its bones: open a session, claim, run, settle.
"""

import asyncio
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from holdfast import Holdfast, Job, State
from holdfast.codec import encode_result
from holdfast.failures import capture
from holdfast.lifecycle import Failed, Outcome, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session, Store

console = Console()
folder = Path(tempfile.mkdtemp(prefix="holdfast-hello-"))
app = Holdfast(f"sqlite:///{folder / 'jobs.db'}")


@app.task(queue="mail", priority="high")
async def welcome(user_id: int, locale: str = "en") -> str:
    """Greets a user."""
    return f"{'Hallo' if locale == 'de' else 'Hello'}, user {user_id}"


@app.task(queue="mail", max_retries=1)
def poison() -> None:
    """Always fails, and ends in the dead letters."""
    raise RuntimeError("this job cannot succeed")


async def run(job: Job) -> Outcome:
    """Call the task's function; whatever happens becomes an outcome."""
    spec = app.tasks[job.task]
    try:
        answer = spec.function(**spec.signature.decode(job.payload))
        result = await answer if spec.is_async else answer
    except Exception as error:
        return Failed(capture(error, at=SYSTEM.clock.now(), attempt=job.attempt + 1))
    return Succeeded(encode_result(result))


async def work_until_empty(store: Store) -> None:
    """Claim and settle until nothing is left."""
    session_id = SYSTEM.ids.session_id()
    await store.open_session(Session(id=session_id, queues=("mail",)))
    while True:
        claimed = await store.claim(ClaimRequest(session_id=session_id, queues=("mail",), limit=10))
        moves = [settle(job, await run(job), RetryPolicy(), SYSTEM.random) for job in claimed.jobs]
        await store.apply(moves)
        for move in moves:
            console.print(f"  {move.job_id}  [bold]{move.to}[/]  ({move.reason})")
        if not claimed.jobs:
            if claimed.due_in is None:
                break
            await asyncio.sleep(claimed.due_in / 1_000_000)
    await store.close_session(session_id)


async def main() -> None:
    """The whole story."""
    async with app:
        console.print(f"Jobs are kept in [bold]{folder / 'jobs.db'}[/]\n")
        job = await welcome.options(key="welcome:42").aenqueue(42, locale="de")
        again = await welcome.options(key="welcome:42").aenqueue(42, locale="de")
        console.print(f"enqueued {job}\nenqueued it again with the same key: created={again.created}, same job")
        await app.aenqueue_many(welcome.job(user_id) for user_id in range(5))
        await poison.aenqueue()
        await welcome.options(delay=0.5).aenqueue(7)
        console.print("\nworking:")
        await work_until_empty(app.store)
        console.print(f"\nresult of the first job: {await job.aresult(timeout=5)!r}")
        table = Table("queue", *State)
        for counts in await app.acounts():
            table.add_row(counts.queue, *(str(getattr(counts, state)) for state in State))
        console.print(table)
        for dead in (await app.afind(states=["failed"])).jobs:
            console.print(f"dead letter: {dead.task}, {len(dead.failures)} failures, last: {dead.failures[-1].message}")


if __name__ == "__main__":
    asyncio.run(main())
