-- What a move does to a job whose guard holds. Writes are gathered and made by `flush`, batch by batch.

-- The server refuses what needs memory when it has none left, unless the script has written before. Settling must
-- always be possible, so this write, which changes nothing, comes first.
redis.call('HDEL', meta, '')

local rows, let_go, expires, completed_ids, tally, processing_of, written = {}, {}, {}, {}, {}, {}, {}
local wake_up = false

local function count(name, by) tally[name] = (tally[name] or 0) + by end

-- `row`: what `states` has of it, if that was read already.
local function read(id, row)
  if not rows[id] then
    row = row or redis.call('HGET', states, id)
    if row then
      rows[id] = parsed(row)
    else
      local record = redis.call('HGET', jobs, id)
      if record then rows[id] = as_enqueued(record) end
    end
  end
  return rows[id]  -- nil: it is not there, or cannot be read
end

local function added(lists, name, id)
  local list = lists[name]
  if list then list[#list + 1] = id else lists[name] = {id} end
end

-- The holder of a key: its job and whether its time has come; nil if nobody holds it.
local function key_holder(text)
  local held = redis.call('HGET', keys, text)
  if not held then return nil end
  local expires_at, job_id = string.match(held, '^(%d+)\t([^\t]+)\t')
  return job_id, (tonumber(expires_at) or 0) <= now
end

local function free_key(id, text)
  if key_holder(text) == id then
    redis.call('HDEL', keys, text)
    redis.call('ZREM', key_expiry, text)
  end
end

-- Whether the job can have its key back; if so, it has it.
local function take_key(id, text)
  local holder, over = key_holder(text)
  if holder and holder ~= id and not over then return false end
  local text_of = string.match(redis.call('HGET', jobs, id) or '', '^[^\n]*\n([^\n]*)\n')
  local readable, meaning = pcall(cjson.decode, text_of or '')
  if not readable or type(meaning) ~= 'table' or not meaning.key then return true end
  local expires_at = whole(now + meaning.key[2])
  redis.call('HSET', keys, text, expires_at .. '\t' .. id .. '\t' .. meaning.key[1])
  redis.call('ZADD', key_expiry, expires_at, text)
  return true
end

-- Lines up a job that may be due: the next claim finds its place by its time.
local function line_up(id, run_at, lane)
  redis.call('ZADD', later, run_at, id .. '\t' .. lane)
  count('waiting', 1)
  if not wake_up then
    wake_up = tonumber(run_at) <= now or redis.call('ZRANGE', later, 0, 0)[1] == id .. '\t' .. lane
  end
end

-- Takes a waiting job out of its line. In its lane's list only a trace stays behind, which a claim drops.
local function leave_line(id, lane)
  count('waiting', -1)
  if redis.call('ZREM', later, id .. '\t' .. lane) == 0 and redis.call('HINCRBY', lanes, lane, -1) <= 0 then
    redis.call('HDEL', lanes, lane)
    redis.call('SADD', idle_lanes, lane)  -- what is left there are traces: see sweep.lua
  end
end

-- m: to, reason, delay (nil: keep the place), raise, key ('keep', 'free' or 'take'), wrote. False: the key is taken.
local function carry_out(id, m)
  local r = rows[id]
  local retention, priority, share, key = string.match(r.fixed, FIXED)
  local lane = priority .. '\t' .. share
  if key ~= '' and m.key == 'take' and not take_key(id, key) then return false end
  if key ~= '' and m.key == 'free' then free_key(id, key) end
  if r.state == 'in_flight' then
    added(let_go, r.session, id)
    if r.cancel == '1' then redis.call('SREM', cancels, id) end
  elseif r.state == 'ready' then
    leave_line(id, lane)
  elseif r.state == 'failed' then
    redis.call('ZREM', dead, id)
  end  -- where it was to expire it is skipped: see prune.lua
  if r.state ~= 'ready' then count(r.state, -1) end
  r.state, r.reason, r.version, r.wrote = m.to, m.reason, whole(r.version + m.raise), m.wrote
  if m.delay then r.run_at = whole(now + m.delay) end
  if m.to == 'ready' then
    r.cancel, r.ended_at = '0', ''
    line_up(id, r.run_at, lane)
  else
    r.ended_at = whole(now)
    count(m.to, 1)
    if m.to == 'failed' then
      redis.call('ZADD', dead, 0, id)
    else
      added(expires, retention, id)
    end
    if m.to == 'succeeded' then completed_ids[#completed_ids + 1] = id end
  end
  r.changed = true
  return true
end

local function flush()
  for session, ids in pairs(let_go) do
    local processing = processing_of[session]
    redis.call('HDEL', processing, unpack(ids))
    if redis.call('EXISTS', processing) == 0 then redis.call('SREM', holders, session) end
  end
  for id, r in pairs(rows) do
    if r.changed then
      written[#written + 1] = id
      written[#written + 1] = row_of(r)
    end
  end
  if #written > 0 then redis.call('HSET', states, unpack(written)) end
  for retention, ids in pairs(expires) do  -- those that end together expire together: one entry
    redis.call('ZADD', expiry, whole(now + retention), table.concat(ids, ' '))
  end
  if #completed_ids > 0 then
    redis.call('LPUSH', completed, unpack(completed_ids))
    redis.call('LTRIM', completed, 0, MOST_COMPLETED - 1)
  end
  for name, by in pairs(tally) do
    if by ~= 0 then redis.call('HINCRBY', meta, name, by) end
  end
  if wake_up then wake_somebody() end
end
