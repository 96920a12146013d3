"""From a store URL and an application's settings to a `RedisStore`."""

from __future__ import annotations

import os
import ssl
from urllib.parse import unquote

from holdfast.config import Settings
from holdfast.errors import InvalidOption, shown
from holdfast.ports import Ports
from holdfast.stores.redis.layout import Names
from holdfast.stores.redis.store import RedisStore, Tuning
from holdfast.stores.redis.topology import Cluster, OneServer, Topology, Watched
from holdfast.stores.redis.wire import Access, Place

_PORT, _SENTINEL_PORT = 6379, 26379
_LONGEST_BLOCK = 30.0


def redis_store(
    scheme: str,
    netloc: str,
    path: str,
    *,
    settings: Settings,
    create: bool,
    ports: Ports,
    namespace: str = "holdfast",
    durability: str = "server",
    timeout: float | None = None,
    ssl_ca: str = "",
) -> RedisStore:
    """The store. `timeout` stands for all three of the settings' time-outs."""
    if timeout is not None and not 0.1 <= timeout <= 3600:
        raise InvalidOption(f"timeout must be 0.1 to 3600 seconds, not {timeout!r:.40}")
    if ssl_ca and not scheme.startswith("rediss"):
        raise InvalidOption("ssl_ca is for rediss://: with redis:// nothing is encrypted")
    kind = scheme.removeprefix("rediss").removeprefix("redis")
    credentials, _, hosts = netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    topology, db = _topology(kind, _places(hosts, _SENTINEL_PORT if kind == "+sentinel" else _PORT), path)
    tuned = settings.redis
    access = Access(
        username=unquote(username),
        password=unquote(password),
        db=db,
        tls=_tls(ssl_ca) if scheme.startswith("rediss") else None,
        dial_timeout=timeout or tuned.dial_timeout,
        read_timeout=timeout or tuned.read_timeout,
        write_timeout=timeout or tuned.write_timeout,
    )
    ttl = settings.worker.lease_ttl
    return RedisStore(
        topology,
        access,
        namespace=namespace,
        names=_names(settings),
        tuning=Tuning(
            block=tuned.brpoplpush_timeout or min(ttl / 2, _LONGEST_BLOCK),
            heartbeat_ttl=ttl,
            max_retries=tuned.max_retries,
            pool_size=tuned.pool_size_multiplier * (os.cpu_count() or 1),
            min_idle=tuned.min_idle_conns,
        ),
        durability=durability,
        create=create,
        ports=ports,
    )


def _topology(kind: str, places: list[Place], path: str) -> tuple[Topology, int]:
    if kind == "+cluster":
        if path:
            raise InvalidOption("a cluster has one database: the URL is redis+cluster://host:port,host:port")
        return Cluster(places), 0
    if kind == "+sentinel":
        name, _, number = path.partition("/")
        if not name:
            raise InvalidOption("the URL names no primary: it is redis+sentinel://host:port,host:port/name/0")
        return Watched(places, name), _database(number)
    return OneServer(places), _database(path)


def _database(number: str) -> int:
    if number and not (number.isascii() and number.isdigit() and len(number) < 6):
        # Behind a "/" in a password that was not escaped comes the rest of it.
        found = "what is there: are special characters escaped, as %2F for /?" if "@" in number else shown(number)
        raise InvalidOption(f"the database of a Redis URL is a number, as in redis://host:port/0, not {found}")
    return int(number or 0)


def _places(hosts: str, port: int) -> list[Place]:
    places = []
    for host in (hosts or "localhost").split(","):
        name, colon, number = host.rpartition(":")
        if host.endswith("]") or not colon:  # an IPv6 address without a port, or a name without one
            name, number = host, str(port)
        if not name or not (number.isascii() and number.isdigit()) or not 0 < int(number) < 65536:
            raise InvalidOption(
                "the store URL cannot be read: it is redis://user:password@host:port/0, with special characters "
                "escaped, as %40 for @"
            )
        places.append(Place(name.strip("[]"), int(number)))
    return places


def _tls(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise InvalidOption(f"ssl_ca={shown(ca)} cannot be read: {error}") from error


def _names(settings: Settings) -> Names | None:
    """What the settings choose, or None if they leave everything as it is."""
    chosen = settings.redis
    ready = {
        str(settings.queues.priority(int(label) if label.lstrip("-").isdigit() else label)): name
        for label, name in chosen.queues.items()
    }
    names = Names(
        processing=chosen.processing_list_pattern,
        heartbeat=chosen.heartbeat_key_pattern,
        completed=chosen.completed_list,
        dead=chosen.dead_letter_list,
        ready=ready,
    )
    return None if names == Names() else names
