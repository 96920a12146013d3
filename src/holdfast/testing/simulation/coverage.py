"""What must have happened in a large enough number of runs: a run in which no reply is ever lost proves nothing.

Names as `Report.happenings` counts them.
"""

from __future__ import annotations

from collections import Counter

from holdfast.testing.simulation.swarm import Conduct, Engine, Mishap

_FAULTS = ("refused", "request lost", "reply lost", "reply late", "request late", "store away")
_VERBS = (
    *("insert", "claim", "apply", "beat", "held", "lost", "sessions", "open_session", "close_session"),
    *("note", "prune", "get", "request_cancel"),
)

MUST_HAPPEN = (
    # The network.
    *(f"{verb}: {fault}" for verb in _VERBS for fault in _FAULTS),
    *(f"{verb}: request twice" for verb in _VERBS if verb != "insert"),
    *(f"{verb}: reply lost in a restart" for verb in ("insert", "claim", "apply", "beat", "sessions", "lost")),
    *(f"{verb}: cut off" for verb in ("claim", "apply", "beat", "held", "lost", "open_session", "prune")),
    *("claim: reply cut off", "beat: reply cut off"),
    *("wake-up lost", "set_paused: refused", "set_paused: store away"),
    # Hosts, clocks and the store.
    *(mishap.value for mishap in Mishap if mishap not in (Mishap.KILL, Mishap.KILL_PRODUCER)),
    *("kill worker", "kill keeper", "kill producer", "crash worker"),
    *("process died", "process killed at its hard limit"),
    # Handlers.
    *(f"handler: {conduct}" for conduct in Conduct),
    # What producers were told.
    *("enqueue created", "enqueue existing", "enqueue full", "enqueue key_conflict"),
    *("enqueue: KeyConflict", "enqueue: QueueFull", "enqueue: OutcomeUnknown", "enqueue: StoreUnavailable"),
    *("batch repeated", "batch: PartlyRefused"),
    *("cancel: cancelled", "cancel: asked", "cancel: ended", "cancel: JobNotFound", "cancel: OutcomeUnknown"),
    *("replay", "replay: JobStillLive", "replay: KeyConflict", "replay: OutcomeUnknown", "pause", "resume"),
    *("result", "result: JobFailed", "result: NotFinished", "result: ResultNotKept", "result: OutcomeUnknown"),
    # What became of claims.
    *("Claim", "Start", "Effect", "End", "Close", "Stopped", "Healed", "KeeperReady", "cancelled while ready"),
    *("succeeded applied", "succeeded already", "succeeded stale"),
    *("retried applied", "retried already", "retried stale", "retried cancel_asked"),
    *("exhausted applied", "exhausted already", "exhausted stale"),
    *("permanent applied", "permanent already", "permanent stale"),
    *("released applied", "released already", "released stale", "released cancel_asked"),
    *("snoozed applied", "snoozed already", "snoozed stale"),
    *("snoozed_out applied", "snoozed_out already", "snoozed_out stale"),
    *("crashed applied", "crashed already", "crashed stale"),
    *("lost applied", "lost already", "lost stale"),
    *("cancelled applied", "cancelled already"),
    *("replayed applied", "replayed stale", "replayed key_taken"),
    # What workers and keepers told.
    *(
        "SessionLost",
        "SessionRescued",
        "JobsRescued",
        "JobsPruned",
        "LoopBlocked",
        "HandlerStuck",
        "SettleRefused",
        "TaskUnknown",
    ),
    *("PartFailed", "KeeperFailed", "WorkerStopped", "repeated"),
)


def never_happened(happenings: Counter[str], engine: Engine | None = None) -> list[str]:
    """What is missing. `engine`: all runs were on that one."""
    engines = [engine] if engine else list(Engine)
    return [what for what in (*MUST_HAPPEN, *(f"run on {one}" for one in engines)) if not happenings[what]]
