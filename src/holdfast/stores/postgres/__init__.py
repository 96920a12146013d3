"""The PostgreSQL engine: small hot tables, verbs as functions in the database, claims that look where the jobs are.

Start with `store.py`. What the server does is in `migrations/`; what is asked of it, and how answers are read, in
`verbs.py`; connections in `connections.py`; where a claim begins to look in `lookback.py`.
"""

from holdfast.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
