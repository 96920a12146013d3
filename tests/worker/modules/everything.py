"""What a supervisor is told to run: `tests.worker.modules.everything:app`."""

from __future__ import annotations

from tests.worker.modules import app, mail, pdf

__all__ = ["app", "mail", "pdf"]
