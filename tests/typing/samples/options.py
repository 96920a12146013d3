"""Options keep the types of the task, and are typed themselves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import reveal_type

from holdfast import PAYLOAD, Exponential, Holdfast, Steps

app = Holdfast("memory://")


@app.task
async def greet(name: str) -> str:
    return f"hello {name}"


@app.task(backoff=Steps((1, 2)), permanent=(KeyError, OSError), unique=60.0, on_failed=greet, isolation="process")
def double(n: int) -> int:
    return 2 * n


async def right() -> None:
    later = greet.options(delay=60, priority="low", key="welcome:42", correlation_id="c")
    reveal_type(later.enqueue("Ann"))  # R: JobHandle[str]
    reveal_type(await (await later.aenqueue("Ann")).aresult())  # R: str
    twice = later.options(delay=timedelta(1)).options(run_at=datetime.now(UTC), key=PAYLOAD, priority=5)
    reveal_type(twice.enqueue("Ann").result())  # R: str
    reveal_type(double.options(queue="math", share="a", max_retries=1, retention=0.5).enqueue(1))  # R: JobHandle[int]
    double.options(connection=object()).enqueue(1)
    app.task(backoff=lambda failures: 1.5 * failures)
    app.task(backoff=Exponential(max=5))


async def wrong() -> None:
    greet.options(delay=60).enqueue(5)  # E: Argument 1 to "enqueue" of "Enqueuer" has incompatible type "int"
    await greet.options(delay=60).aenqueue()  # E: Missing positional argument "name"
    greet.options(delay=1).options(key="k").job("Ann", colour="red")  # E: Unexpected keyword argument "colour"
    greet.options(colour="red")  # E: Unexpected keyword argument "colour" for "options" of "Enqueuer"
    greet.options(60)  # E: Too many positional arguments for "options" of "Enqueuer"
    greet.options(delay="soon")  # E: Argument "delay" to "options" of "Enqueuer" has incompatible type "str"
    greet.options(priority=1.5)  # E: Argument "priority" to "options" of "Enqueuer" has incompatible type "float"
    greet.options(key=5)  # E: Argument "key" to "options" of "Enqueuer" has incompatible type "int"
    greet.options(run_at="2030")  # E: Argument "run_at" to "options" of "Enqueuer" has incompatible type "str"


def wrong_task_options() -> None:
    app.task(retries=5)  # E: Unexpected keyword argument "retries" for overloaded function "task" of "Holdfast"
    app.task(queue=5)  # E: No overload variant of "task" of "Holdfast" matches argument type "int"
    app.task(isolation="thread")  # E: No overload variant of "task" of "Holdfast" matches argument type "str"
    app.task(permanent=[KeyError])  # E: No overload variant of "task" of "Holdfast" matches argument type
    app.task("name")  # E: No overload variant of "task" of "Holdfast" matches argument type "str"
