"""What can go wrong on the way to the server, in one form for both drivers, and what it means."""

from __future__ import annotations

from holdfast.errors import StoreError, StoreUnavailable

# The server's numbers.
CHANGED_SINCE_READ = 1020
DUPLICATE = 1062
PACKET_TOO_LARGE = 1153
LOCK_WAIT_TIMEOUT = 1205
DEADLOCK = 1213
NO_SUCH_TABLE = 1146
NEEDS_SUPER_FOR_TRIGGER = 1419
READ_ONLY = frozenset({1290, 1792, 1836})

RERUN = frozenset({CHANGED_SINCE_READ, DUPLICATE, LOCK_WAIT_TIMEOUT, DEADLOCK})
"""After these the whole verb is rolled back and run again: what it has read may no longer be true."""

_LOST = frozenset(
    {0, 1040, 1042, 1043, 1053, 1077, 1078, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1317, 1927}
    | set(range(2000, 2100))
)
"""The connection is gone, or was never made: shutdown, kill, network, too many connections."""

_ACCESS = frozenset({1044, 1045, 1049, 1142, 1143, 1227, 1370, 1449, 1698})


class Fault(Exception):
    """What a driver said. `code` is the server's number, 0 if there is none. `lost`: so is the connection."""

    def __init__(self, code: int, text: str, *, lost: bool = False) -> None:
        super().__init__(f"{text} ({code or 'no code'})")
        self.code = code
        self.lost = lost or code in _LOST

    @property
    def spoils(self) -> bool:
        """Whether the connection is good for nothing now: after a failover it may lead to what has become a replica."""
        return self.lost or self.code in READ_ONLY


def fault_of(error: BaseException) -> Fault:
    """Any error of a driver or its socket. Its text never has a password in it: no driver puts it there."""
    code, text = 0, str(error) or type(error).__name__
    if error.args and isinstance(error.args[0], int):
        code = error.args[0]
        text = str(error.args[1]) if len(error.args) > 1 else text
    lost = not (error.args and isinstance(error.args[0], int)) or isinstance(error, OSError)
    return Fault(code if not isinstance(error, OSError) else 0, text, lost=lost)


def store_error(fault: Fault, where: str) -> StoreError:
    """The error of our tree. Nothing was written."""
    what = f"{where} says: {fault}"
    if fault.code == PACKET_TOO_LARGE:
        return StoreUnavailable(f"{what}. Nothing was written; raise max_allowed_packet, or send references, not data")
    if fault.code in READ_ONLY:
        return StoreUnavailable(f"{what}. Nothing was written: this server is read-only, most likely a replica")
    if fault.code == NEEDS_SUPER_FOR_TRIGGER:
        return StoreUnavailable(
            f"{what}. With a binary log, making a trigger needs the privilege SUPER, or the server's setting "
            f"log_bin_trust_function_creators = 1"
        )
    if fault.code in _ACCESS:
        return StoreUnavailable(f"{what}. Check the user, its password and what is granted to it")
    if fault.code == NO_SUCH_TABLE:
        return StoreUnavailable(f"{what}. `holdfast migrate` makes the tables")
    return StoreUnavailable(f"{what}. Nothing was written; trying again is safe")
