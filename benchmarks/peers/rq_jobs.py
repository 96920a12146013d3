"""`python rq_jobs.py PORT fill COUNT PAYLOAD` enqueues calls with that JSON as their named arguments, by RQ's defaults.
`python rq_jobs.py PORT start COUNT` begins so many of them as RQ's worker does, and ends none.

It runs in an environment of its own that has RQ. To begin a job is what `Worker` does between taking a job and calling
its function: the job leaves the queue (by way of the intermediate list), an execution is written and registered with
the job and in the StartedJobRegistry, and the job gets its status, its worker and its heartbeat. One worker begins them
all, and its own key is gone when it ends: RQ needs one worker, with a key of its own, for each job in flight. The
worker looks after its jobs every hour instead of every 30 seconds, so that no execution has expired when the memory is
read: its expiry is that time and a minute.
"""

import json
import sys

from redis import Redis
from rq import Queue, SimpleWorker  # type: ignore[import-not-found]

BATCH = 1_000
HOUR = 3_600


def fill(queue: Queue, count: int, payload: str) -> None:
    arguments = json.loads(payload)
    for done in range(0, count, BATCH):
        calls = [Queue.prepare_data("tasks.noop", kwargs=arguments) for _ in range(min(BATCH, count - done))]
        queue.enqueue_many(calls)


def start(queue: Queue, count: int) -> None:
    worker = SimpleWorker([queue], connection=queue.connection, job_monitoring_interval=HOUR)
    worker.register_birth()
    for _ in range(count):
        taken = Queue.dequeue_any([queue], None, queue.connection)
        if taken is None:
            raise RuntimeError("the queue is empty too early")
        job, _queue = taken
        worker.prepare_execution(job)
        worker.prepare_job_execution(job, remove_from_intermediate_queue=True)
    worker.register_death()
    queue.connection.delete(worker.key)


def main() -> None:
    port, verb, count, *payload = sys.argv[1:]
    queue = Queue("bench", connection=Redis(port=int(port)))
    if verb == "fill":
        fill(queue, int(count), *payload)
    else:
        start(queue, int(count))


if __name__ == "__main__":
    main()
