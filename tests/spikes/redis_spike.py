"""A spike of the store port on Redis: one Lua script per verb and slot, every key declared, server time only.

Everything of a queue has the hash tag `{queue}`. The root of a session (beat counter, open or closed: the decision) has
a tag of its own; in each of its queues the session has a part that follows the root, so that claims and moves check
it in their own script. `then` jobs leave by an outbox of the move's queue: accepted with the move, delivered after it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from holdfast.errors import SessionClosed
from holdfast.job import Job, JobId, NewJob, SessionId
from holdfast.lanes import Lane, serving_order
from holdfast.lifecycle import Applied, Move
from holdfast.store import Beat, Claimed, ClaimRequest, Session

# A job is three fields under its id: `news` as inserted and `writes` as the last move wrote it, both opaque to Lua,
# and `rows`, which scripts read and write. Lua numbers are doubles: exact up to 2^53, as microseconds the year 2255.
QUEUE_KEYS = ("rows", "news", "writes", "scheduled", "lanes", "holders", "outbox", "seq")
PREAMBLE = """
local rows, news, writes, scheduled, lanes, holders, outbox, seq = unpack(KEYS, 1, 8)
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function read(id) local row = redis.call('HGET', rows, id) return row and cmsgpack.unpack(row) end
local function save(id, row) redis.call('HSET', rows, id, cmsgpack.pack(row)) end
local function line_up(lane, row, id)
  redis.call('ZADD', lane, row.run_at, string.format('%016.0f', row.seq) .. id)
end
local function add(out, id, row)
  out[#out + 1] = redis.call('HGET', news, id)
  out[#out + 1] = cmsgpack.pack(row)
  out[#out + 1] = redis.call('HGET', writes, id)
end
"""
ROOT_SCRIPTS = {
    "open": "if redis.call('HSETNX', KEYS[1], 'open', 1) == 1 then"
    " redis.call('HSET', KEYS[1], 'beat', 0, 'queues', ARGV[1]) end",
    "beat": "if redis.call('HGET', KEYS[1], 'open') ~= '1' then return false end"
    " redis.call('HINCRBY', KEYS[1], 'beat', 1) return redis.call('HGET', KEYS[1], 'queues')",
    "close": "local root = redis.call('HMGET', KEYS[1], 'open', 'beat', 'queues')"
    " if root[1] == '1' and ARGV[1] ~= '' and ARGV[1] ~= root[2] then return {0, ''} end"
    " if root[1] == '1' then redis.call('HSET', KEYS[1], 'open', 0) end"
    " return {root[1] == '1' and 1 or 0, root[3] or ''}",
}
QUEUE_SCRIPTS = {
    "insert": """
for i = 1, #ARGV / 6 do
  local id, new, write, lane, run_at, delay = unpack(ARGV, 6 * i - 5, 6 * i)
  if redis.call('HSETNX', news, id, new) == 1 then
    local due = run_at == '' and now + delay or math.max(now, tonumber(run_at))
    local row = {state = 'ready', reason = 'enqueued', run_at = due, seq = redis.call('INCR', seq), created_at = now,
                 version = 0, lane = lane}
    save(id, row)
    redis.call('HSET', writes, id, write)
    redis.call('HINCRBY', lanes, lane, 1)
    if due <= now then line_up(KEYS[8 + i], row, id) else redis.call('ZADD', scheduled, due, id) end
  end
end""",
    "beat": """
local held, asked = redis.call('HKEYS', KEYS[10]), {}
for _, id in ipairs(held) do if read(id).cancel_asked then asked[#asked + 1] = id end end
return {redis.call('HGET', KEYS[9], 'open') == '1' and 1 or 0, #held, asked}""",
    "claim": """
local session, limit, groups = ARGV[1], tonumber(ARGV[2]), cmsgpack.unpack(ARGV[3])
if redis.call('HGET', KEYS[9], 'open') ~= '1' then return 'closed' end
local key_of, at = {}, 10
for _, group in ipairs(groups) do
  for _, lane in ipairs(group) do at = at + 1; key_of[lane] = KEYS[at] end
end
local waiting = redis.call('HGETALL', lanes)
for i = 1, #waiting, 2 do
  if waiting[i + 1] ~= '0' and not key_of[waiting[i]] then return {'lanes', redis.call('HKEYS', lanes)} end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', scheduled, '-inf', now, 'LIMIT', 0, 1000)) do
  redis.call('ZREM', scheduled, id)
  local row = read(id)
  line_up(key_of[row.lane], row, id)
end
local taken, out = 0, {}
for _, group in ipairs(groups) do  -- lanes.draw
  while #group > 0 and taken < limit do
    local quota, more = math.ceil((limit - taken) / #group), {}
    for _, lane in ipairs(group) do
      local asked = math.min(quota, limit - taken)
      local got = asked > 0 and redis.call('ZPOPMIN', key_of[lane], asked) or {}
      for i = 1, #got, 2 do
        local id = string.sub(got[i], 17)
        local row = read(id)
        row.state, row.reason, row.session_id = 'in_flight', 'claimed', session
        row.version, row.claimed_at = row.version + 1, now
        save(id, row)
        redis.call('HSET', KEYS[10], id, row.version)
        add(out, id, row)
      end
      taken = taken + #got / 2
      if #got > 0 then redis.call('HINCRBY', lanes, lane, -#got / 2) end
      if asked > 0 and #got == 2 * asked then more[#more + 1] = lane end
    end
    group = more
  end
end
if taken > 0 then redis.call('SADD', holders, session) end
local next_due = tonumber(redis.call('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2])
for _, key in pairs(key_of) do
  local first = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
  if first and (not next_due or first < next_due) then next_due = first end
end
return {'jobs', now, next_due or -1, out}""",
    "apply": """
local function judge(move, row)  -- lifecycle.judge
  if not row then return 'gone' end
  local own = not move.session_id or row.session_id == move.session_id
  if own and row.state == move.to and row.reason == move.reason
    and (not move.version or row.version == move.version + move.raised) then return 'already' end
  if not (own and move.sources[row.state] and (not move.version or row.version == move.version)) then return 'stale' end
  if move.session_open ~= nil and (redis.call('HGET', KEYS[9 + 2 * move.part], 'open') == '1') ~= move.session_open
  then return 'stale' end
  return row.cancel_asked and not move.despite_cancel and 'cancel_asked' or 'applied'
end
local answers, i = {}, 1
while i < #ARGV do
  local move, after = cmsgpack.unpack(ARGV[i]), i + 2
  local following = after + 2 * move.following
  local row = read(move.id)
  local answer = judge(move, row)
  answers[#answers + 1] = answer
  if answer == 'applied' then
    if row.state == 'in_flight' then
      redis.call('HDEL', KEYS[10 + 2 * move.part], move.id)
      if redis.call('EXISTS', KEYS[10 + 2 * move.part]) == 0 then redis.call('SREM', holders, move.session_id) end
    end
    row.state, row.reason, row.version = move.to, move.reason, row.version + move.raised
    if move.delay then row.run_at = now + move.delay end
    if move.to == 'ready' then
      row.cancel_asked, row.ended_at = nil, nil
      redis.call('HINCRBY', lanes, row.lane, 1)
      redis.call('ZADD', scheduled, row.run_at, move.id)  -- the key of its lane is not known here: claim lines it up
    else row.ended_at = now end
    save(move.id, row)
    redis.call('HSET', writes, move.id, ARGV[i + 1])
    for j = after, following - 1, 2 do redis.call('HSET', outbox, ARGV[j], ARGV[j + 1]) end
  end
  i = following
end
return answers""",
    "cancel": """
for _, id in ipairs(ARGV) do
  local row = read(id)
  if row and row.state == 'in_flight' then row.cancel_asked = true; save(id, row) end
end""",
    "lost": """
local out = {}
for i = 9, #KEYS, 2 do
  if ARGV[2] == 'held' or redis.call('HGET', KEYS[i], 'open') ~= '1' then
    for _, id in ipairs(redis.call('HKEYS', KEYS[i + 1])) do
      if #out < 3 * ARGV[1] then add(out, id, read(id)) end
    end
  end
end
return out""",
}
NOTHING_WRITTEN: dict[str, object] = dict.fromkeys(("attempt", "failures", "crashes", "snoozes"), 0)
NOTHING_WRITTEN |= {"suspect": False, "failure_history": b"", "result": None}
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def decode_jobs(flat: Sequence[bytes]) -> list[Job]:
    empty = {**dict.fromkeys(Job.__struct_fields__), "cancel_asked": False}
    return [
        msgspec.convert({**empty, **decode(new), **decode(row), **decode(write)}, Job)
        for new, row, write in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]


def encode_move(move: Move, sessions: Sequence[SessionId]) -> list[str | bytes]:
    """What the script reads (no None: to Lua that is absent; no bytes: its msgpack fails), then what it only stores."""
    names = ("version", "session_id", "session_open", "despite_cancel", "to", "reason", "delay")
    read = {name: value for name in names if (value := getattr(move, name)) is not None}
    read |= {"id": move.job_id, "sources": dict.fromkeys(move.sources, True), "raised": int(move.raise_version)}
    read |= {"part": sessions.index(move.session_id) if move.session_id else 0, "following": len(move.then)}
    write = encode({name: getattr(move, name) for name in NOTHING_WRITTEN})
    return [encode(read), write, *(part for new in move.then for part in (new.id, encode(new)))]


class RedisSpike:
    """`claim`, `apply`, `beat`, `close_session` and `lost` of the port, and as much of the rest as these need."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self.client: Any = client  # its annotations say `bytes | str` for every answer
        self.namespace = namespace
        self._root_scripts = {name: client.register_script(text) for name, text in ROOT_SCRIPTS.items()}
        self._scripts = {name: client.register_script(PREAMBLE + text) for name, text in QUEUE_SCRIPTS.items()}
        self._lanes: defaultdict[str, set[Lane]] = defaultdict(set)
        self.calls: list[tuple[str, str]] = []

    def key(self, tag: str, *rest: str) -> str:
        return ":".join((self.namespace, f"{{{tag}}}", *rest))

    async def _at_root(self, verb: str, session_id: SessionId, *args: str) -> Any:
        return await self._root_scripts[verb](keys=[self.key(f"session {session_id}")], args=args)

    async def _at_queue(
        self, verb: str, queue: str, args: Iterable[Any], *, sessions: Iterable[str] = (), lanes: Iterable[str] = ()
    ) -> Any:
        self.calls.append((verb, queue))
        keys = [self.key(queue, name) for name in QUEUE_KEYS]
        keys += [self.key(queue, kind, session) for session in sessions for kind in ("part", "held")]
        keys += [self.key(queue, "lane", lane) for lane in lanes]
        return await self._scripts[verb](keys=keys, args=list(args))

    async def insert(self, jobs: Sequence[NewJob]) -> None:
        for queue in {job.queue: None for job in jobs}:
            await self.client.sadd(f"{self.namespace}:queues", queue)
            news = [job for job in jobs if job.queue == queue]
            lanes = [f"{new.priority}:{new.share}" for new in news]
            args: list[object] = []
            for new, lane in zip(news, lanes, strict=True):
                run_at = "" if new.run_at is None else new.run_at
                args += [new.id, encode(new), encode(NOTHING_WRITTEN), lane, run_at, new.delay]
            await self._at_queue("insert", queue, args, lanes=lanes)

    async def open_session(self, session: Session) -> None:
        await self._at_root("open", session.id, " ".join(session.queues))
        for queue in session.queues:
            await self.client.sadd(f"{self.namespace}:queues", queue)
            # Never over a part that is closed: a close that overtakes this call wins.
            await self.client.hsetnx(self.key(queue, "part", session.id), "open", "1")

    async def beat(self, session_id: SessionId) -> Beat:
        queues = await self._at_root("beat", session_id)
        if queues is None:
            return Beat(open=False, held=0, cancel=())
        calls = [self._at_queue("beat", queue, (), sessions=[session_id]) for queue in queues.decode().split()]
        parts = await asyncio.gather(*calls)
        cancel = tuple(job_id.decode() for part in parts for job_id in part[2])
        return Beat(open=all(part[0] for part in parts), held=sum(part[1] for part in parts), cancel=cancel)

    async def held(self, session_id: SessionId) -> list[Job]:
        queues = await self.client.hget(self.key(f"session {session_id}"), "queues") or b""
        calls = [self._at_queue("lost", q, [1000, "held"], sessions=[session_id]) for q in queues.decode().split()]
        return [job for flat in await asyncio.gather(*calls) for job in decode_jobs(flat)]

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        closed, queues = await self._at_root("close", session_id, "" if if_beat is None else str(if_beat))
        for queue in queues.decode().split():
            await self.close_part(queue, session_id)
        return bool(closed)

    async def close_part(self, queue: str, session_id: SessionId) -> None:
        await self.client.hset(self.key(queue, "part", session_id), "open", "0")

    async def claim(self, request: ClaimRequest) -> Claimed:
        jobs: list[Job] = []
        now, due = 0, []
        for queue in request.queues:
            if len(jobs) < request.limit:
                now, next_due, flat = await self._claim_from(queue, request, request.limit - len(jobs))
                due += [next_due] if next_due >= 0 else []
                jobs += decode_jobs(flat)
        return Claimed(tuple(jobs), now, min(due) - now if due else None)

    async def _claim_from(self, queue: str, request: ClaimRequest, limit: int) -> Any:
        while True:
            order = serving_order(self._lanes[queue], request.turn)
            groups = [[f"{lane.priority}:{lane.share}" for lane in group] for group in order]
            args = [request.session_id, limit, encode(groups)]
            answer = await self._at_queue(
                "claim", queue, args, sessions=[request.session_id], lanes=[lane for group in groups for lane in group]
            )
            if answer == b"closed":
                raise SessionClosed(f"session {request.session_id} is not open in queue {queue!r}")
            if answer[0] == b"jobs":
                return answer[1:]
            # Jobs wait in a lane that this process did not know: once more, with its key declared.
            known = [lane.decode().split(":", 1) for lane in answer[1]]
            self._lanes[queue] = {Lane(queue, int(priority), share) for priority, share in known}

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        answers = dict.fromkeys(range(len(moves)), Applied.GONE)
        for queue in {move.queue: None for move in moves}:
            places = [at for at, move in enumerate(moves) if move.queue == queue]
            sessions = sorted({moves[at].session_id or "" for at in places} - {""})
            args = [arg for at in places for arg in encode_move(moves[at], sessions)]
            said = await self._at_queue("apply", queue, args, sessions=sessions)
            answers |= {at: Applied(answer.decode()) for at, answer in zip(places, said, strict=True)}
            if any(moves[at].then for at in places):
                await self.deliver(queue)
        return list(answers.values())

    async def deliver(self, queue: str) -> None:
        """Insert what moves left in the queue's outbox. Any process may; ids make repeating it safe."""
        outbox = self.key(queue, "outbox")
        for job_id, new in (await self.client.hgetall(outbox)).items():
            await self.insert([decode(new, type=NewJob)])
            await self.client.hdel(outbox, job_id)

    async def request_cancel(self, queue: str, job_ids: Sequence[JobId]) -> None:
        await self._at_queue("cancel", queue, job_ids)

    async def lost(self, limit: int) -> list[Job]:
        jobs: list[Job] = []
        for queue in sorted(await self.client.smembers(f"{self.namespace}:queues")):
            name = queue.decode()
            holders = [session.decode() for session in await self.client.smembers(self.key(name, "holders"))]
            for session in holders:
                if await self.client.hget(self.key(f"session {session}"), "open") != b"1":
                    # Whoever closed the root may have died before it reached this queue.
                    await self.close_part(name, session)
            jobs += decode_jobs(await self._at_queue("lost", name, [limit - len(jobs), "lost"], sessions=holders))
        return jobs
