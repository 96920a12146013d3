"""The program: its commands, and how what they raise becomes a message and an exit code.

0: done. 1: the operation failed (no such job, the store cannot be reached, a check found something bad). 2: bad usage
or configuration. 130: Ctrl-C.
"""

from __future__ import annotations

import io
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from holdfast.cli.bench import bench
from holdfast.cli.dead import dead
from holdfast.cli.demo import demo
from holdfast.cli.doctor import doctor
from holdfast.cli.enqueue import enqueue
from holdfast.cli.jobs import jobs
from holdfast.cli.keep import keep
from holdfast.cli.migrate import migrate
from holdfast.cli.output import note, write_line
from holdfast.cli.queues import queues
from holdfast.cli.stats import show_stats
from holdfast.cli.wording import masked
from holdfast.cli.worker import worker
from holdfast.cli.workers import list_workers
from holdfast.errors import HoldfastError, InvalidOption, InvalidPayload, UnknownTask

_BAD_USAGE = (InvalidOption, InvalidPayload, UnknownTask)


class Program(TyperGroup):
    """The commands, with our errors as one line on standard error."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Ctrl-C and errors of usage are typer's own to report."""
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()
            return answer
        except HoldfastError as error:
            for own_traceback in getattr(error, "__notes__", ()):
                sys.stderr.write(masked(own_traceback))
            note(f"holdfast: {error}")
            raise typer.Exit(2 if isinstance(error, _BAD_USAGE) else 1) from None
        except typer.Abort:  # Ctrl-C or Ctrl-D at a question
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # Whoever read the output has seen enough. What is still buffered must not fail when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


program = typer.Typer(
    cls=Program,
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Help and errors of usage are drawn with boxes for people, and plain for files and pipes.
    rich_markup_mode="rich" if sys.stdout.isatty() and sys.stderr.isatty() else None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        write_line(f"holdfast {version('holdfast')}")
        raise typer.Exit


@program.callback()
def holdfast(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """A job queue that does not let go of a job."""


_WORK, _LOOK, _STORE = "Work", "Look and steer", "Store"
program.command("demo", rich_help_panel=_WORK)(demo)
program.command("worker", rich_help_panel=_WORK)(worker)
program.command("enqueue", rich_help_panel=_WORK)(enqueue)
program.command("keep", rich_help_panel=_WORK)(keep)
program.add_typer(jobs, name="jobs", rich_help_panel=_LOOK)
program.add_typer(dead, name="dead", rich_help_panel=_LOOK)
program.add_typer(queues, name="queues", rich_help_panel=_LOOK)
program.command("workers", rich_help_panel=_LOOK)(list_workers)
program.command("stats", rich_help_panel=_LOOK)(show_stats)
program.command("migrate", rich_help_panel=_STORE)(migrate)
program.command("doctor", rich_help_panel=_STORE)(doctor)
program.command("bench", rich_help_panel=_STORE)(bench)


def main() -> None:
    """Run the command line of this process."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no UTF-8 is no reason to fail
    program(prog_name="holdfast")
