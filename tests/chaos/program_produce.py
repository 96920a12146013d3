"""A producer in a process of its own, until SIGTERM: `python -m tests.chaos.program_produce URL`."""

from __future__ import annotations

import signal
import sys

from holdfast.ports import SYSTEM
from holdfast.stores import open_store
from tests.chaos.producer import Producer
from tests.chaos.program import HOST, note


def main() -> None:
    """Say so as soon as a job was accepted, and go on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with Producer(open_store(sys.argv[1], SYSTEM), note, host=HOST, intent=True) as producer:
        while not producer.accepted and producer.error is None:
            if signal.sigtimedwait({signal.SIGTERM}, 0.01) is not None:
                return
        print("producing", flush=True)
        while signal.sigtimedwait({signal.SIGTERM}, 0.1) is None and producer.error is None:
            pass


if __name__ == "__main__":
    main()
