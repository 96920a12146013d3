"""What mypy knows about results. `# R:` says what `reveal_type` must reveal."""

from __future__ import annotations

from typing import reveal_type

from holdfast import Holdfast, JobHandle

app = Holdfast("memory://")


@app.task
async def greet(name: str) -> str:
    return f"hello {name}"


@app.task
def double(n: int) -> int:
    return 2 * n


@app.task(queue="mail", priority="high", max_retries=3, timeout=30)
async def sizes(names: list[str]) -> dict[str, int]:
    return {name: len(name) for name in names}


@app.task(name="nothing")
def nothing() -> None: ...


async def asynchronous() -> None:
    job = await greet.aenqueue("Ann")
    reveal_type(job)  # R: JobHandle[str]
    reveal_type(await job.aresult())  # R: str
    reveal_type(await job.aresult(timeout=5))  # R: str
    reveal_type(await job.arefresh())  # R: JobHandle[str]
    reveal_type(await (await double.aenqueue(1)).aresult())  # R: int
    reveal_type(await (await sizes.aenqueue([])).aresult())  # R: dict[str, int]
    reveal_type(await app.aenqueue_many(greet.job(name) for name in "ab"))  # R: list[JobHandle[str]]
    reveal_type(job.state)  # R: State
    reveal_type(await job.acancel())  # R: CancelAnswer
    reveal_type(job.failures)  # R: list[Failure]


def blocking() -> None:
    reveal_type(double)  # R: Task[[n: int], int]
    reveal_type(greet)  # R: Task[[name: str], str]
    reveal_type(double.enqueue(1))  # R: JobHandle[int]
    reveal_type(double.enqueue(1).result())  # R: int
    reveal_type(greet.enqueue("Ann").result(timeout=1))  # R: str
    reveal_type(sizes.enqueue([]).refresh())  # R: JobHandle[dict[str, int]]
    reveal_type(nothing.enqueue().result())  # R: None
    reveal_type(app.enqueue_many([double.job(1)]))  # R: list[JobHandle[int]]
    reveal_type(app.enqueue_many([double.job(1), greet.job("Ann")]))  # R: list[JobHandle[object]]
    reveal_type(app.get("id"))  # R: JobHandle[Any]


def wrong() -> None:
    text: str = double.enqueue(1).result()  # E: Incompatible types in assignment (expression has type "int"
    job: JobHandle[int] = greet.enqueue("Ann")  # E: Incompatible types in assignment (expression has type
    print(text, job)
