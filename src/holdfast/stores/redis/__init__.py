"""The engine on Redis or Valkey: one server, one that sentinels watch, or a cluster.

A verb of the port is one Lua script on one queue (`lua/`, put together by `scripts`), called by a generator that
knows no connection (`verbs`, `sessions`, `reading`, `opening`, `examine`). `dispatch` finds the server (`topology`) and
deals with errors (`faults`); `connections` carries that out on the `wire`. `layout` names the keys, `records` is how
jobs look in them, `wakeups` waits, `url` reads a store URL.
"""

from holdfast.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
