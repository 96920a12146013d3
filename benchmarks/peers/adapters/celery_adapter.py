"""Celery, on Redis or RabbitMQ. Its guide to optimisation: prefetch much for short tasks, results ignored."""

import os

from celery import Celery
from kombu.exceptions import OperationalError
from protocol import ENGINE, VARIANT, Info, Peer, address, become, empty_redis, main, mark, versions

POOL = VARIANT or "prefork"
AT_ONCE = 8 if POOL == "threads" else os.cpu_count() or 1
PREFETCH = 128 if POOL == "prefork" else 16
QUEUE = "bench"

app = Celery("celery_adapter", broker=address("BENCH_RABBITMQ_URL" if ENGINE == "rabbitmq" else "BENCH_REDIS_URL"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_default_queue=QUEUE,
    task_ignore_result=True,
    worker_enable_remote_control=False,
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=PREFETCH,
    worker_send_task_events=False,
)


@app.task(name="noop", ignore_result=True)
def noop(i, s):
    mark()


class CeleryPeer(Peer):
    info = Info(
        lib="celery",
        version=versions("celery"),
        backend=ENGINE,
        settings=f"pool {POOL} of {AT_ONCE}, prefetch {PREFETCH} each, results ignored, early ack (default), no gossip",
        durability="early ack: a job that runs when its worker crashes is lost",
        threads=POOL == "threads",
        pending={"redis": [["LLEN", QUEUE], ["ZCARD", "unacked_index"]]} if ENGINE == "redis" else None,
    )

    def setup(self):
        if ENGINE == "redis":
            empty_redis()
            return
        with app.connection_for_write() as connection:
            try:
                connection.default_channel.queue_delete(QUEUE)
            except OperationalError as error:
                raise SystemExit(f"RabbitMQ does not answer: {error}") from error

    def enqueue(self, i, s):
        noop.delay(i, s)

    def worker(self):
        quiet = ["--loglevel", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        pool = ["--pool", POOL, "--concurrency", str(AT_ONCE)]
        become("celery", "--app", "celery_adapter:app", "worker", *pool, *quiet, "--hostname", f"w{os.getpid()}@bench")


PEER = CeleryPeer()

if __name__ == "__main__":
    main()
