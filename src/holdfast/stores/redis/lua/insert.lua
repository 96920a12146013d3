-- ARGV: checkpoint's name or '', its value before ('=' and the text, or ''), its new value, max_depth, warn_depth; then
-- for each job: id, when ('+' delay, or '=' run_at), number of its lane, key ('' or window, hash, text), body.
-- Answer for each job: 'c' created, 'd' and deep, 'e' the id is there, 'f' full, '=' or '!' and the key's job; then
-- 'first' if the queue had never had a job, or has lost everything.
local name, was, value, max_depth, warn_depth = unpack(ARGV, 1, 5)
if name ~= '' then
  local found = redis.call('HGET', checkpoints, name)
  if (found and '=' .. found or '') ~= was then return 'moved' end
end
max_depth, warn_depth = tonumber(max_depth), tonumber(warn_depth)

local known = redis.call('HMGET', meta, 'waiting', 'pushed')
local waiting, pushed = tonumber(known[1] or 0), tonumber(known[2] or 0)
local answers, records, members, delayed, in_line, taken, key_times = {}, {}, {}, {}, {}, {}, {}
local added, full, seen, holders_now = 0, false, {}, {}
for i = 6, #ARGV, 5 do
  local id, due, lane, key, body = unpack(ARGV, i, i + 4)
  local answer
  local window, hash, text = string.match(key, '^(%d+)\t([^\t]*)\t(.*)$')
  if seen[id] or redis.call('HEXISTS', jobs, id) == 1 then
    answer = 'e'
  elseif text then
    local held = holders_now[text] or redis.call('HGET', keys, text)
    if held then
      local expires_at, holder, its_hash = string.match(held, '^(%d+)\t([^\t]+)\t(.*)$')
      if tonumber(expires_at) > now then answer = (its_hash == hash and '=' or '!') .. holder end
    end
  end
  if not answer and max_depth and waiting >= max_depth then
    answer, full = 'f', true
  end
  if not answer then
    local run_at = string.sub(due, 1, 1) == '+' and now + string.sub(due, 2) or math.max(now, string.sub(due, 2))
    waiting, added, seen[id] = waiting + 1, added + 1, true
    answer = warn_depth and waiting >= warn_depth and 'd' or 'c'
    records[#records + 1] = id
    records[#records + 1] = whole(run_at) .. '\t' .. whole(now) .. '\t' .. body
    members[#members + 1] = 0
    members[#members + 1] = id
    local name_of_lane = string.match(body, '^%d+\t(%-?%d+\t[^\t]*)\t')
    -- Lists are in the order of time. What comes in the same microsecond, or after the clock was set back, is lined up
    -- by its time with those that come later.
    if run_at <= now and now > pushed then
      lane = tonumber(lane)
      in_line[lane] = in_line[lane] or {name = name_of_lane}
      table.insert(in_line[lane], id)
    else
      delayed[#delayed + 1] = whole(run_at)
      delayed[#delayed + 1] = id .. '\t' .. name_of_lane
    end
    if text then
      local expires_at = whole(now + window)
      holders_now[text] = expires_at .. '\t' .. id .. '\t' .. hash
      taken[#taken + 1] = text
      taken[#taken + 1] = holders_now[text]
      key_times[#key_times + 1] = expires_at
      key_times[#key_times + 1] = text
    end
  end
  answers[#answers + 1] = answer
end
if name ~= '' then
  if full then return 'full' end
  redis.call('HSET', checkpoints, name, value)
end
if added == 0 then
  -- Who repeats an insert waits for replicas or the disk again, and newer servers count only what this connection wrote.
  redis.call('HDEL', meta, '')  -- possible without memory, too: see moves.lua
  redis.call('HINCRBY', meta, 'repeated', 1)
  return answers
end

redis.call('HSET', jobs, unpack(records))
redis.call('ZADD', index, unpack(members))
redis.call('HINCRBY', meta, 'waiting', added)
if #taken > 0 then
  redis.call('HSET', keys, unpack(taken))
  redis.call('ZADD', key_expiry, unpack(key_times))
end
for lane, ids in pairs(in_line) do
  table.sort(ids)
  redis.call('RPUSH', KEYS[OWN_KEYS + lane], unpack(ids))
  redis.call('HINCRBY', lanes, ids.name, #ids)
  redis.call('HSET', meta, 'pushed', whole(now))
  wake_somebody()
end
if #delayed > 0 then
  redis.call('ZADD', later, unpack(delayed))
  local first = redis.call('ZRANGE', later, 0, 0)[1]
  for i = 2, #delayed, 2 do
    if delayed[i] == first then wake_somebody() end
  end
end
if not known[1] then answers[#answers + 1] = 'first' end
return answers
