"""Calls with wrong arguments. `# E:` says what mypy must report about its line."""

from __future__ import annotations

from holdfast import Holdfast

app = Holdfast("memory://")


@app.task
async def welcome(user_id: int, locale: str = "en") -> str:
    return f"{user_id} {locale}"


@app.task(queue="math", max_retries=5)
def double(n: int, *, label: str) -> float:
    return 2.0 * n


async def right() -> None:
    welcome.enqueue(42)
    welcome.enqueue(42, "de")
    welcome.enqueue(user_id=42, locale="de")
    await welcome.aenqueue(42, locale="de")
    welcome.job(42)
    double.enqueue(1, label="x")
    app.enqueue_many(welcome.job(n) for n in range(3))
    await app.aenqueue_many([double.job(1, label="x")])


async def wrong_types() -> None:
    welcome.enqueue("42")  # E: Argument 1 to "enqueue" of "Enqueuer" has incompatible type "str"; expected "int"
    await welcome.aenqueue("42")  # E: Argument 1 to "aenqueue" of "Enqueuer" has incompatible type "str"
    welcome.job(None)  # E: Argument 1 to "job" of "Enqueuer" has incompatible type "None"; expected "int"
    welcome.enqueue(42, locale=5)  # E: Argument "locale" to "enqueue" of "Enqueuer" has incompatible type "int"
    double.enqueue(1.5, label="x")  # E: Argument 1 to "enqueue" of "Enqueuer" has incompatible type "float"
    await double.aenqueue(1, label=b"x")  # E: Argument "label" to "aenqueue" of "Enqueuer" has incompatible type
    welcome("42")  # E: Argument 1 to "__call__" of "Task" has incompatible type "str"; expected "int"


async def missing() -> None:
    welcome.enqueue()  # E: Missing positional argument "user_id" in call to "enqueue" of "Enqueuer"
    await welcome.aenqueue(locale="de")  # E: Missing positional argument "user_id" in call to "aenqueue" of "Enqueuer"
    welcome.job()  # E: Missing positional argument "user_id" in call to "job" of "Enqueuer"
    double.enqueue(1)  # E: Missing named argument "label" for "enqueue" of "Enqueuer"


async def too_much() -> None:
    welcome.enqueue(42, "de", "more")  # E: Too many arguments for "enqueue" of "Enqueuer"
    welcome.enqueue(42, colour="red")  # E: Unexpected keyword argument "colour" for "enqueue" of "Enqueuer"
    await welcome.aenqueue(42, colour="red")  # E: Unexpected keyword argument "colour" for "aenqueue" of "Enqueuer"
    welcome.job(42, colour="red")  # E: Unexpected keyword argument "colour" for "job" of "Enqueuer"
    double.enqueue(1, "x")  # E: Too many positional arguments for "enqueue" of "Enqueuer"


def not_jobs() -> None:
    app.enqueue_many([welcome])  # E: Argument 1 to "enqueue_many" of "Holdfast" has incompatible type
    app.enqueue_many(welcome.job(1), 5)  # E: No overload variant of "enqueue_many" of "Holdfast" matches argument types
