"""RQ on Redis: the worker that does not fork for each job, the faster one of its two."""

from protocol import HERE, Info, Peer, address, become, empty_redis, main, mark, versions
from redis import Redis
from rq import Queue

QUEUE = "bench"
TASK = "rq_adapter.noop"


def noop(i, s):
    mark()


class RqPeer(Peer):
    info = Info(
        lib="rq",
        version=versions("rq"),
        backend="redis",
        settings="SimpleWorker (no fork), result_ttl=0",
        durability="kept in a registry while it runs; abandoned jobs are failed by maintenance, not run again",
        threads=False,
        pending={"redis": [["LLEN", f"rq:queue:{QUEUE}"], ["ZCARD", f"rq:wip:{QUEUE}"]]},
    )

    def setup(self):
        empty_redis()

    def connect(self):
        self.queue = Queue(QUEUE, connection=Redis.from_url(address("BENCH_REDIS_URL")))

    def enqueue(self, i, s):
        self.queue.enqueue(TASK, i, s, result_ttl=0)

    def enqueue_many(self, items):
        self.queue.enqueue_many([Queue.prepare_data(TASK, args=item, result_ttl=0) for item in items])

    def worker(self):
        url = address("BENCH_REDIS_URL")
        become("rq", "worker", "--quiet", "--url", url, "--path", str(HERE), "--worker-class", "rq.SimpleWorker", QUEUE)


PEER = RqPeer()

if __name__ == "__main__":
    main()
