"""`holdfast migrate`: bring a store's schema to this version."""

from __future__ import annotations

from holdfast.app import Holdfast
from holdfast.cli.options import StoreArgument, operate
from holdfast.cli.output import write_line
from holdfast.cli.wording import masked, visible


def migrate(store: StoreArgument) -> None:
    """Create the store, or bring its schema up to date.

    Safe to repeat, and by several processes at once.
    """

    async def opened(app: Holdfast) -> None:
        """Opening is all it takes: a store brings its own schema up to date."""

    operate(store, opened, create=True)
    write_line(f"{visible(masked(store))} is up to date")
