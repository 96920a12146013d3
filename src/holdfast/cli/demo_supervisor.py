"""The process behind the workers of `holdfast demo`: it is `holdfast worker`, with its output in a file.

Called as `python -m holdfast.cli.demo_supervisor PARENT LOG APP OPTION...`. It ends with the demo, however that ends.
"""

from __future__ import annotations

import os
import resource
import sys

from holdfast.cli.program import program
from holdfast.worker.process_tree import die_with_parent


def main(arguments: list[str]) -> None:
    """Work until told to stop."""
    parent, log, *command = arguments
    die_with_parent(int(parent))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(output, standard)
    _leave_no_cores()
    program(["worker", *command], prog_name="holdfast")


def _leave_no_cores() -> None:
    """Let processes crash without a core file, and without a word to a program that collects them."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    # 1, not 0: where the kernel hands cores to a program, 0 does not stop it.
    resource.setrlimit(resource.RLIMIT_CORE, (1 if most else 0, most))


if __name__ == "__main__":
    main(sys.argv[1:])
