"""An application whose tasks are spread over modules, as those of most programs are.

Nobody imports them all but the programs themselves: `alone`, a worker without a supervisor, and `everything`, what a
supervisor is told to run.
"""

from __future__ import annotations

import os

from holdfast import Holdfast

app = Holdfast(os.environ.get("HOLDFAST_TEST_STORE", "memory://"))
