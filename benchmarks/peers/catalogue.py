"""Which job queues are measured beside ours, as data: where each runs, what it is made of, which program drives it.

A peer is known by its engine and its name: Huey on Redis and Huey on SQLite are two peers of one group. A group is what
is installed together: a virtual environment or a node folder of its own, because several Python peers need different
versions of redis-py. Versions are pinned by name; where they come from is the business of pip and npm.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Engine = Literal["redis", "postgres", "sqlite", "rabbitmq"]
Language = Literal["python", "node"]

ADAPTERS = Path(__file__).resolve().parent / "adapters"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"
"""Where the peers are installed unless another folder is named."""

NODE_AT_LEAST = (22, 18)
"""The oldest node that every Node peer here runs on. An older one is left alone: NODE is installed beside the peer."""
NODE = "22.23.3"

ADDRESSES: Mapping[Engine, str] = {
    "redis": "BENCH_REDIS_URL",
    "postgres": "BENCH_POSTGRES_URL",
    "sqlite": "BENCH_SQLITE_PATH",
    "rabbitmq": "BENCH_RABBITMQ_URL",
}
"""The environment variable that tells an adapter where its server is."""


@dataclass(frozen=True)
class Group:
    """What is installed together. `python_at_least` is what its authors ask for, where that is more than we do."""

    language: Language
    requirements: tuple[str, ...]
    python_at_least: tuple[int, int] = (3, 11)


@dataclass(frozen=True)
class Entry:
    """One peer. `variant` is handed to the adapter: another way to run the same library."""

    name: str
    engine: Engine
    group: str
    adapter: str
    variant: str = ""
    is_default: bool = False

    @property
    def language(self) -> Language:
        return GROUPS[self.group].language

    @property
    def requirements(self) -> tuple[str, ...]:
        return GROUPS[self.group].requirements

    @property
    def environment(self) -> dict[str, str]:
        """What the adapter must find in its environment besides the addresses and BENCH_MARKS."""
        return {"BENCH_ENGINE": self.engine, "BENCH_VARIANT": self.variant}


GROUPS: Mapping[str, Group] = {
    "arq": Group("python", ("arq==0.28.0", "uvloop==0.23.0")),
    "awa": Group("python", ("awa-pg==0.6.9", "psycopg[binary]==3.3.8", "uvloop==0.23.0")),
    "bullmq": Group("node", ("bullmq@6.7.0", "ioredis@5.11.1")),
    "celery": Group("python", ("celery[redis]==5.7.0", "hiredis==3.5.0")),
    "dramatiq": Group("python", ("dramatiq[redis]==2.2.1", "hiredis==3.5.0")),
    "graphile-worker": Group("node", ("graphile-worker@0.18.0", "pg@8.23.1")),
    "graphile-worker-0.17": Group("node", ("graphile-worker@0.17.3", "pg@8.23.1")),
    "huey": Group("python", ("huey==3.5.4", "redis==8.1.0", "hiredis==3.5.0")),
    "oban": Group("python", ("oban==0.7.0", "psycopg[binary]==3.3.8", "uvloop==0.23.0"), python_at_least=(3, 12)),
    "pg-boss": Group("node", ("pg-boss@12.35.0", "pg@8.23.1")),
    "pgqueuer": Group("python", ("pgqueuer[asyncpg]==1.6.0", "psycopg[binary]==3.3.8", "uvloop==0.23.0")),
    "procrastinate": Group("python", ("procrastinate==3.10.0", "psycopg[binary]==3.3.8", "uvloop==0.23.0")),
    "rq": Group("python", ("rq==2.12.0", "redis==8.1.0")),
    "saq": Group("python", ("saq[hiredis,postgres]==0.26.4", "psycopg[binary]==3.3.8", "uvloop==0.23.0")),
    "streaq": Group("python", ("streaq==7.2.0", "redis==8.1.0", "uvloop==0.23.0")),
    "taskiq": Group("python", ("taskiq[uv]==0.13.0", "taskiq-redis==1.2.4", "hiredis==3.5.0")),
}

CATALOGUE: Sequence[Entry] = (
    Entry("bullmq", "redis", "bullmq", "bullmq_adapter.js", is_default=True),
    Entry("taskiq", "redis", "taskiq", "taskiq_adapter.py", is_default=True),
    Entry("huey", "redis", "huey", "huey_adapter.py", is_default=True),
    Entry("saq", "redis", "saq", "saq_adapter.py"),
    Entry("dramatiq", "redis", "dramatiq", "dramatiq_adapter.py"),
    Entry("streaq", "redis", "streaq", "streaq_adapter.py"),
    Entry("arq", "redis", "arq", "arq_adapter.py"),
    Entry("celery", "redis", "celery", "celery_adapter.py"),
    Entry("celery-threads", "redis", "celery", "celery_adapter.py", variant="threads"),
    Entry("rq", "redis", "rq", "rq_adapter.py"),
    Entry("pg-boss", "postgres", "pg-boss", "pgboss_adapter.js", is_default=True),
    Entry("pg-boss-5000", "postgres", "pg-boss", "pgboss_adapter.js", variant="2-5000", is_default=True),
    Entry("pg-boss-each", "postgres", "pg-boss", "pgboss_adapter.js", variant="2-1000-each"),
    Entry("pgqueuer", "postgres", "pgqueuer", "pgqueuer_adapter.py", is_default=True),
    Entry("graphile-worker", "postgres", "graphile-worker", "graphile_adapter.js", is_default=True),
    Entry("graphile-worker-0.17", "postgres", "graphile-worker-0.17", "graphile_adapter.js"),
    Entry("awa", "postgres", "awa", "awa_adapter.py"),
    Entry("oban", "postgres", "oban", "oban_adapter.py"),
    Entry("saq", "postgres", "saq", "saq_adapter.py"),
    Entry("procrastinate", "postgres", "procrastinate", "procrastinate_adapter.py"),
    Entry("huey", "sqlite", "huey", "huey_adapter.py", is_default=True),
    Entry("celery", "rabbitmq", "celery", "celery_adapter.py"),
)


def of_engine(engine: Engine, *, defaults_only: bool = False) -> list[Entry]:
    """The peers on an engine, in the order of the catalogue: the default ones first."""
    return [entry for entry in CATALOGUE if entry.engine == engine and (entry.is_default or not defaults_only)]


def named(names: Iterable[str]) -> list[Entry]:
    """The peers with these names, on every engine that they run on; all of them if no name is given. A name may say the
    engine too: `huey@sqlite`. Raises KeyError for a name that is not in the catalogue.
    """
    wanted = list(names)
    if not wanted:
        return list(CATALOGUE)
    found: list[Entry] = []
    for name in wanted:
        entries = [entry for entry in CATALOGUE if name in {entry.name, f"{entry.name}@{entry.engine}"}]
        if not entries:
            raise KeyError(f"no peer is called {name}; known are {', '.join(sorted({e.name for e in CATALOGUE}))}")
        found += [entry for entry in entries if entry not in found]
    return found
