"""How a program finds the application: `module:attribute`, with the current folder importable."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from types import ModuleType

from holdfast.app import Holdfast, importing
from holdfast.errors import InvalidOption, shown


def load_app(name: str) -> Holdfast:
    """The application that `name` stands for, as in `shop.jobs:app`.

    `InvalidOption` if there is no such module or attribute, or it is no `Holdfast`. If the module itself fails, the
    error says with what, and carries the module's own traceback as a note.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute.isidentifier():
        raise InvalidOption(
            f"the application must be given as module:attribute, as in shop.jobs:app, not {shown(name)}"
        )
    if module_name.endswith(".py") or "/" in module_name:
        raise InvalidOption(
            f"{shown(module_name)} is a file: name the module, as Python imports it from the current folder "
            f"(shop/jobs.py is shop.jobs)"
        )
    module = _import(module_name)
    try:
        app = getattr(module, attribute)
    except AttributeError:
        known = [known for known, value in vars(module).items() if isinstance(value, Holdfast)]
        hint = f"; its applications are: {', '.join(known)}" if known else ""
        raise InvalidOption(f"module {module_name} has no {attribute!r}{hint}") from None
    if not isinstance(app, Holdfast):
        raise InvalidOption(f"{name} is not a Holdfast application but a {type(app).__qualname__}")
    return app


def _import(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path[:1]:
        sys.path.insert(0, here)
    try:
        with importing(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module itself or a package above it: one that the module asks for is the module's own error.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidOption(
                f"there is no module {error.name!r} in {here} or among the installed packages"
            ) from None
        raise _own_error(name, error) from None
    except SystemExit as error:
        raise InvalidOption(
            f"module {name} ended the program while it was imported (exit code {error.code}): put what it runs under "
            f'`if __name__ == "__main__":`'
        ) from None
    except Exception as error:
        raise _own_error(name, error) from None


def _own_error(name: str, error: Exception) -> InvalidOption:
    refused = InvalidOption(f"module {name} cannot be imported: {type(error).__qualname__}: {error}")
    frames = error.__traceback__
    while frames is not None and _is_machinery(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    refused.add_note("".join(traceback.format_exception(type(error), error, frames)))
    return refused


def _is_machinery(file: str) -> bool:
    return file in (__file__, importlib.__file__) or file.startswith("<frozen importlib")
