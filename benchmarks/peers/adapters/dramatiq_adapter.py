"""Dramatiq on Redis: one process with its default of eight threads."""

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from protocol import Info, Peer, address, become, empty_redis, main, mark, versions

THREADS = 8

dramatiq.set_broker(RedisBroker(url=address("BENCH_REDIS_URL")))


@dramatiq.actor
def noop(i, s):
    mark()


class DramatiqPeer(Peer):
    info = Info(
        lib="dramatiq",
        version=versions("dramatiq"),
        backend="redis",
        settings=f"--processes 1 --threads {THREADS} (default), no results",
        durability="acked after success; messages of a dead worker are requeued after its heartbeat timeout of 60 s",
        threads=True,
        pending={"redis": [["HLEN", "dramatiq:default.msgs"]]},
    )

    def setup(self):
        empty_redis()

    def enqueue(self, i, s):
        noop.send(i, s)

    def worker(self):
        become("dramatiq", "dramatiq_adapter", "--processes", "1", "--threads", str(THREADS), "--skip-logging")


PEER = DramatiqPeer()

if __name__ == "__main__":
    main()
