"""MySQL 8 and MariaDB 10.6 or newer: any number of workers on any number of machines.

`store.py` is the face. A verb is a plan (`sql.py`), a generator of statements: `inserts.py`, `claims.py`,
`settlements.py`, `sessions.py`, `tending.py` and `queries.py` have them. `steps.py` makes a transaction of a plan,
`drive.py` carries it out, on the store's connections (`pool.py`, `server.py`) or on a caller's (`guest.py`).
"""

from holdfast.stores.mysql.store import MysqlStore

__all__ = ["MysqlStore"]
