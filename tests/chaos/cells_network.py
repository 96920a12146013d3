"""Harm to the network between workers, producers and their server.

The wire of a cell lasts as long as the cell, so every cell ends its run itself (`Rig.finish`) before the wire goes.
"""

from __future__ import annotations

import random
import re
import time

import msgspec

from holdfast.stores.redis.scripts import load_scripts
from tests.chaos.cell import SERVERS, Cell
from tests.chaos.proxy import Proxy
from tests.chaos.rig import PATIENCE, TTL, Rig
from tests.faults.engines import ENGINES

_LONGER_THAN_A_LEASE = 2 * TTL
_IMPATIENT = 1.0
_LONGEST_CUT = 3000
"""Bytes: a few statements, or half of one."""


class _Marks(msgspec.Struct, frozen=True):
    """By what the verbs are known on the wire. `commit`: what makes them count, if it travels alone."""

    enqueue: re.Pattern[bytes]
    claim: re.Pattern[bytes]
    ack: re.Pattern[bytes]
    commit: re.Pattern[bytes] | None = None


def _script(*names: str) -> re.Pattern[bytes]:
    return re.compile(b"|".join(re.escape(load_scripts()[name].sha.encode()) for name in names))


_MARKS = {
    "postgres": _Marks(
        re.compile(rb"_insert(_fresh|_alike)?\("), ENGINES["postgres"].claim_mark, re.compile(rb"_(settle|succeed)\(")
    ),
    "mariadb": _Marks(
        re.compile(rb"INSERT INTO holdfast_ready"),
        ENGINES["mariadb"].claim_mark,
        re.compile(rb"INSERT INTO holdfast_ended"),
        re.compile(rb"COMMIT"),
    ),
    "redis": _Marks(_script("insert", "put"), _script("claim"), _script("apply")),
}


def _black_hole(rig: Rig) -> None:
    """The worker that was cut off must work again: in the end it is the only one."""
    with Proxy(rig.server.port) as wire:
        cut_off = rig.worker(url=rig.url(port=wire.port, timeout=_IMPATIENT), wait=False)
        other = rig.worker()
        cut_off.wait_for("worker started", seconds=PATIENCE)
        with rig.producer():
            rig.wait_for_more(20)
            rig.fault("black hole", cut_off.pid)
            wire.hold()
            time.sleep(_LONGER_THAN_A_LEASE)
            wire.pass_on()
            rig.stop(other)
            rig.wait_for_more(20)
        rig.finish()


def _half_open(rig: Rig) -> None:
    """The server keeps what clients have left behind until the end of the run, and nobody waits for it."""
    with Proxy(rig.server.port) as wire:
        url = rig.url(port=wire.port, timeout=_IMPATIENT)
        rig.worker(url=url)
        with rig.producer(url=url):
            rig.wait_for_more(20)
            rig.fault("half open, server gone", rig.engine)
            wire.lose_servers()
            rig.wait_for_more(20)
            rig.fault("half open, client gone", rig.engine)
            wire.lose_clients()
            rig.wait_for_more(20)
        rig.finish()


def _lost_replies(rig: Rig) -> None:
    marks = _MARKS[rig.engine]
    with Proxy(rig.server.port) as wire:
        url = rig.url(port=wire.port, timeout=_IMPATIENT)
        rig.worker(url=url)
        with rig.producer(url=url):
            rig.wait_for_more(10)
            for verb in ("enqueue", "claim", "ack"):
                rig.fault(f"reply to {verb} lost", rig.engine)
                wire.lose_reply(getattr(marks, verb), marks.commit)
                assert wire.lost.wait(PATIENCE), f"no {verb} came by"
                rig.wait_for_more(10)
        rig.finish()


def _broken_off(rig: Rig) -> None:
    """The lengths are chosen by chance, and the history says which they were."""
    chance = random.Random()
    with Proxy(rig.server.port) as wire:
        url = rig.url(port=wire.port, timeout=_IMPATIENT)
        rig.worker(url=url)
        with rig.producer(url=url, every=0.005):
            rig.wait_for_more(20)
            for _ in range(3):
                rig.fault("reset", rig.engine)
                wire.reset()
                time.sleep(chance.uniform(0.02, 0.1))
                rig.fault("end of connection", rig.engine)
                wire.finish()
                time.sleep(chance.uniform(0.02, 0.1))
            for kind in ("request_bytes", "reply_bytes"):
                length = chance.randrange(1, _LONGEST_CUT)
                rig.fault(f"cut after {kind}", str(length))
                wire.cut_after(**{kind: length})
                time.sleep(0.2)
                wire.pass_on()
            rig.wait_for_more(20)
        rig.finish()


def _slow(rig: Rig) -> None:
    with Proxy(rig.server.port) as wire:
        url = rig.url(port=wire.port, timeout=10.0)
        rig.worker(url=url, ttl=10.0)
        with rig.producer(url=url):
            rig.wait_for_more(10)
            rig.fault("slow network", rig.engine)
            wire.slow_down(delay=0.03, jitter=0.04, bytes_per_second=256 * 1024)
            rig.wait_for_more(15)
            wire.pass_on()
        rig.finish()


def _partition(rig: Rig) -> None:
    """First the workers are cut off while jobs come in, in one direction only; then the producer."""
    with Proxy(rig.server.port) as to_workers, Proxy(rig.server.port) as to_producer:
        worker = rig.worker(url=rig.url(port=to_workers.port, timeout=_IMPATIENT))
        with rig.producer(url=rig.url(port=to_producer.port, timeout=_IMPATIENT)):
            rig.wait_for_more(20)
            rig.fault("workers cut off", worker.pid)
            to_workers.hold(requests=False)
            time.sleep(_LONGER_THAN_A_LEASE)
            to_workers.pass_on()
            rig.wait_for_more(20)
            rig.fault("producer cut off", "producer")
            to_producer.hold()
            time.sleep(TTL)
            to_producer.pass_on()
            rig.wait_for_more(5)
        rig.finish()


def _refused(rig: Rig) -> None:
    with Proxy(rig.server.port) as wire:
        url = rig.url(port=wire.port, timeout=_IMPATIENT)
        rig.worker(url=url)
        with rig.producer(url=url):
            rig.wait_for_more(20)
            rig.fault("connections refused", rig.engine)
            wire.refuse()
            wire.reset()
            time.sleep(1.5 * TTL)
            wire.pass_on()
            rig.wait_for_more(20)
        rig.finish()


CELLS: tuple[Cell, ...] = (
    Cell(
        name="replies lost",
        faults="F11",
        about="the answer to an enqueue, a claim and an ack is lost after the server has carried it out",
        engines=SERVERS,
        run=_lost_replies,
    ),
    Cell(
        name="connections broken off",
        faults="F12",
        about="resets and ends in the middle of statements, cuts after a number of bytes chosen by chance",
        engines=SERVERS,
        run=_broken_off,
    ),
    Cell(
        name="black hole",
        faults="F10",
        about="nothing comes through to a worker for longer than its lease lasts, and its connections stay",
        engines=SERVERS,
        run=_black_hole,
    ),
    Cell(
        name="half open",
        faults="F10",
        about="the server's ends of all connections vanish unheard, then the clients'",
        engines=SERVERS,
        run=_half_open,
    ),
    Cell(
        name="partition",
        faults="F14",
        about="workers do not hear the store while jobs are accepted, then the producer is cut off",
        engines=SERVERS,
        run=_partition,
    ),
    Cell(
        name="connections refused",
        faults="F10",
        about="all connections end, and nobody can connect for longer than a lease lasts",
        engines=SERVERS,
        run=_refused,
    ),
    Cell(
        name="slow network",
        faults="F13",
        about="every packet takes 30 to 70 ms, at 256 KiB a second",
        engines=SERVERS,
        run=_slow,
    ),
)
