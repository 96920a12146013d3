"""The engines. Each is one implementation of `holdfast.store.Store`; none imports another.

`open_store` finds the engine for a URL and imports only that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.errors import InvalidOption, shown
from holdfast.ports import Ports
from holdfast.store import Store


def open_store(url: str, ports: Ports) -> Store:
    """The store for `memory://` or `sqlite:///path`, with the options of its query. Nothing is opened yet."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidOption(f"the store URL cannot be read: {error}") from error
    if parts.scheme not in _ENGINES or "://" not in url:
        raise InvalidOption(
            f"no engine for the store URL scheme {shown(parts.scheme)}: use one of "
            f"{', '.join(f'{scheme}://' for scheme in _ENGINES)}, as in sqlite:///jobs.db"
        )
    options = parse_qsl(parts.query, keep_blank_values=True)
    if len(dict(options)) != len(options) or parts.fragment:
        raise InvalidOption("the store URL names an option twice, or has a '#' in it")
    # "///" begins a relative path and "////" an absolute one, as everywhere in Python.
    return _ENGINES[parts.scheme](unquote(parts.path.removeprefix("/")), parts.netloc, dict(options), ports)


def _converted(options: dict[str, str], known: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    converted = {}
    for name, text in options.items():
        if name not in known:
            raise InvalidOption(f"the store URL has an unknown option {shown(name)}: known are {', '.join(known)}")
        try:
            converted[name] = known[name](text)
        except ValueError as error:
            raise InvalidOption(f"the store URL's option {name}={shown(text)} is not valid: {error}") from error
    return converted


def _memory(path: str, host: str, options: dict[str, str], ports: Ports) -> Store:
    from holdfast.stores.memory import MemoryStore

    if path or host:
        raise InvalidOption("memory:// has no path: every store in memory is its own")
    return MemoryStore(ports=ports, **_converted(options, {"capacity": int}))


def _sqlite(path: str, host: str, options: dict[str, str], ports: Ports) -> Store:
    from holdfast.stores.sqlite import SqliteStore

    if host:
        raise InvalidOption("a SQLite URL has three slashes before a relative path, four before an absolute one")
    return SqliteStore(
        path, ports=ports, **_converted(options, {"namespace": str, "durability": str, "timeout": float})
    )


_ENGINES: dict[str, Callable[[str, str, dict[str, str], Ports], Store]] = {"memory": _memory, "sqlite": _sqlite}
