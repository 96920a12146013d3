"""The users of docs/reference/redis.md, made exactly as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.servers import RedisServer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "redis.md"


def rules() -> dict[str, list[str]]:
    """The rules of each user."""
    [block] = re.findall(r"```redis-acl\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line.split() for line in block.splitlines()]
    assert all(line[0] == "user" for line in lines)
    return {line[1]: line[2:] for line in lines}


def password_of(user: str) -> str:
    """What the page gives it."""
    [word] = [rule[1:] for rule in rules()[user] if rule.startswith(">")]
    return word


def add_users(server: RedisServer, namespace: str = "holdfast") -> None:
    """Make them, for another namespace if need be."""
    for user, words in rules().items():
        own = [word.replace("~holdfast:", f"~{namespace}:") for word in words]
        server.ask("ACL", "SETUSER", f"{user}", "reset", *own)


def url_of(server: RedisServer, user: str) -> str:
    """Where that user connects."""
    return f"redis://{user}:{password_of(user)}@127.0.0.1:{server.port}/0"
