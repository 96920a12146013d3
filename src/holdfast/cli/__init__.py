"""The command line: one module per command group. `main` is the program `holdfast`."""

from holdfast.cli.program import main

__all__ = ["main"]
