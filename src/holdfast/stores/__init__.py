"""The engines. Each is one implementation of `holdfast.store.Store`; none imports another.

`open_store` finds the engine for a URL and imports only that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from holdfast.config import Settings
from holdfast.errors import InvalidOption, shown
from holdfast.ports import Ports
from holdfast.store import Store


class _Context(NamedTuple):
    """What every engine is opened with."""

    scheme: str
    ports: Ports
    existing: bool
    settings: Settings | None


def open_store(url: str, ports: Ports, *, existing: bool = False, settings: Settings | None = None) -> Store:
    """The store for a URL such as `sqlite:///path` or `postgresql://…`, with its options. Nothing is opened yet.

    `existing`: one that is not there is an error when it opens, where the engine would otherwise create it. `settings`:
    the application's, for an engine that is tuned by them (Redis).
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        # Python's own message quotes the host part, with the password in it.
        raise InvalidOption("the store URL cannot be read: escape special characters in it, as %40 for @") from None
    if parts.scheme not in _ENGINES or "://" not in url:
        raise InvalidOption(
            f"no engine for the store URL scheme {shown(parts.scheme)}: use one of "
            f"{', '.join(f'{scheme}://' for scheme in _ENGINES)}, as in sqlite:///jobs.db"
        )
    options = parse_qsl(parts.query, keep_blank_values=True)
    if len(dict(options)) != len(options) or parts.fragment:
        raise InvalidOption("the store URL names an option twice, or has a '#' in it")
    # "///" begins a relative path and "////" an absolute one, as everywhere in Python.
    path = unquote(parts.path.removeprefix("/"))
    return _ENGINES[parts.scheme](path, parts.netloc, dict(options), _Context(parts.scheme, ports, existing, settings))


def _converted(options: dict[str, str], known: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    converted = {}
    for name, text in options.items():
        if name not in known and "@" in name:  # behind a "?" in a password that was not escaped comes the rest of it
            raise InvalidOption("the store URL cannot be read: escape special characters in it, as %3F for ?")
        if name not in known:
            raise InvalidOption(f"the store URL has an unknown option {shown(name)}: known are {', '.join(known)}")
        try:
            converted[name] = known[name](text)
        except ValueError as error:
            raise InvalidOption(f"the store URL's option {name}={shown(text)} is not valid: {error}") from error
    return converted


def _memory(path: str, host: str, options: dict[str, str], context: _Context) -> Store:
    from holdfast.stores.memory import MemoryStore

    if path or host:
        raise InvalidOption("memory:// has no path: every store in memory is its own")
    return MemoryStore(ports=context.ports, **_converted(options, {"capacity": int}))


def _sqlite(path: str, host: str, options: dict[str, str], context: _Context) -> Store:
    from holdfast.stores.sqlite import SqliteStore

    if host:
        raise InvalidOption("a SQLite URL has three slashes before a relative path, four before an absolute one")
    known: dict[str, Callable[[str], Any]] = {"namespace": str, "durability": str, "timeout": float}
    return SqliteStore(path, create=not context.existing, ports=context.ports, **_converted(options, known))


def _postgres(path: str, host: str, options: dict[str, str], context: _Context) -> Store:
    """Options that are not ours are libpq's, such as `sslmode`."""
    with _driver("postgres", "psycopg"):
        from holdfast.stores.postgres import PostgresStore

    known: dict[str, Callable[[str], Any]] = {"namespace": str, "timeout": float, "notify": _on_or_off}
    ours = {name: options.pop(name) for name in known if name in options}
    url = f"postgresql://{host}/{quote(path, safe='')}?{urlencode(options, quote_via=quote)}"
    return PostgresStore(url, create=not context.existing, ports=context.ports, **_converted(ours, known))


def _mysql(path: str, host: str, options: dict[str, str], context: _Context) -> Store:
    with _driver("mysql", "pymysql"), _driver("mysql", "asyncmy"):
        from holdfast.stores.mysql import MysqlStore

    known: dict[str, Callable[[str], Any]] = dict.fromkeys(("namespace", "unix_socket", "ssl", "ssl_ca"), str)
    known["timeout"] = float
    return MysqlStore(host, path, create=not context.existing, ports=context.ports, **_converted(options, known))


def _redis(path: str, host: str, options: dict[str, str], context: _Context) -> Store:
    with _driver("redis", "hiredis"):
        from holdfast.stores.redis.url import redis_store

    known: dict[str, Callable[[str], Any]] = {"namespace": str, "durability": str, "timeout": float, "ssl_ca": str}
    settings = context.settings or Settings()
    return redis_store(
        context.scheme,
        host,
        path,
        settings=settings,
        create=not context.existing,
        ports=context.ports,
        **_converted(options, known),
    )


def _on_or_off(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("it is on or off")
    return text == "on"


@contextlib.contextmanager
def _driver(extra: str, module: str) -> Iterator[None]:
    """Name the extra to install, if the driver is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module:
            raise
        raise InvalidOption(f"the driver {module} is not installed: pip install 'holdfast[{extra}]'") from error


_ENGINES: dict[str, Callable[[str, str, dict[str, str], _Context], Store]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgresql": _postgres,
    "postgres": _postgres,
    "mysql": _mysql,
    "mariadb": _mysql,
    "redis": _redis,
    "rediss": _redis,
    "redis+cluster": _redis,
    "rediss+cluster": _redis,
    "redis+sentinel": _redis,
}
