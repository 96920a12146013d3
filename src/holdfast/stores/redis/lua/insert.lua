-- ARGV: checkpoint's name or '', its value before ('=' and the text, or ''), its new value, max_depth, warn_depth; then
-- groups of jobs that differ in id and payload only: when ('+' delay, or '=' run_at), number of their lane, the lane
-- ("priority, tab, share"), key ('' or window, hash, text), the record without its times and payload, how many jobs, and
-- id and payload of each.
-- Answer: how many jobs there were if all are created and none is deep; otherwise for each job: 'c' created, 'd' and deep,
-- 'e' the id is there, 'f' full, '=' or '!' and the key's job; then 'first' if the queue had never had a job, or has lost
-- everything.
local name, was, value, max_depth, warn_depth = unpack(ARGV, 1, 5)
if name ~= '' then
  local found = redis.call('HGET', checkpoints, name)
  if (found and '=' .. found or '') ~= was then return 'moved' end
end
max_depth, warn_depth = tonumber(max_depth), tonumber(warn_depth)

local known = redis.call('HMGET', meta, 'waiting', 'pushed')
local waiting, pushed = tonumber(known[1] or 0), tonumber(known[2] or 0)
local plain = name == '' and not max_depth and not warn_depth
local answers, records, members, delayed, in_line, taken, key_times = {}, {}, {}, {}, {}, {}, {}
local number, added, full, holders_now, there = 0, 0, false, {}, {}

-- Why the job is not to be written, or nil.
local function refusal(window, hash, text)
  if text then
    local held = holders_now[text] or redis.call('HGET', keys, text)
    if held then
      local expires_at, holder, its_hash = string.match(held, '^(%d+)\t([^\t]+)\t(.*)$')
      if tonumber(expires_at) > now then return (its_hash == hash and '=' or '!') .. holder end
    end
  end
  if max_depth and waiting >= max_depth then
    full = true
    return 'f'
  end
end

local i = 6
while i <= #ARGV do
  local due, lane, lane_name, key, head, jobs_here = unpack(ARGV, i, i + 5)
  local last = i + 5 + 2 * jobs_here
  local run_at = string.sub(due, 1, 1) == '+' and now + string.sub(due, 2) or math.max(now, string.sub(due, 2))
  local window, hash, text = string.match(key, '^(%d+)\t([^\t]*)\t(.*)$')
  head = whole(run_at) .. '\t' .. whole(now) .. '\t' .. head
  -- Lists are in the order of time. What comes in the same microsecond, or after the clock was set back, is lined up
  -- by its time with those that come later.
  local line
  if run_at <= now and now > pushed then
    line = in_line[lane] or {name = lane_name}
    in_line[lane] = line
  end
  local ids = {}
  for at = i + 6, last, 2 do ids[#ids + 1] = ARGV[at] end
  local scores = redis.call('ZMSCORE', index, unpack(ids))
  for at, id in ipairs(ids) do
    local answer = (scores[at] or there[id]) and 'e' or not (plain and key == '') and refusal(window, hash, text)
    if not answer then
      waiting, added, there[id] = waiting + 1, added + 1, true
      answer = warn_depth and waiting >= warn_depth and 'd' or 'c'
      records[2 * added - 1], records[2 * added] = id, head .. ARGV[i + 5 + 2 * at]
      members[2 * added - 1], members[2 * added] = 0, id
      if line then
        line.unsorted = line.unsorted or (line.last and id < line.last)
        line[#line + 1], line.last = id, id
      else
        delayed[#delayed + 1] = whole(run_at)
        delayed[#delayed + 1] = id .. '\t' .. lane_name
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
    number = number + 1
    answers[number] = answer
  end
  i = last + 1
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
if #taken > 0 then
  redis.call('HSET', keys, unpack(taken))
  redis.call('ZADD', key_expiry, unpack(key_times))
end
local lined_up = false
for lane, ids in pairs(in_line) do
  if #ids > 0 then
    if ids.unsorted then table.sort(ids) end
    redis.call('RPUSH', KEYS[OWN_KEYS + lane], unpack(ids))
    redis.call('HINCRBY', lanes, ids.name, #ids)
    lined_up = true
  end
end
redis.call('HSET', meta, 'waiting', waiting, 'pushed', whole(lined_up and now or pushed))
if #delayed > 0 then
  redis.call('ZADD', later, unpack(delayed))
  local first = redis.call('ZRANGE', later, 0, 0)[1]
  for j = 2, #delayed, 2 do
    if delayed[j] == first then lined_up = true end
  end
end
if lined_up then wake_somebody() end
if not known[1] then
  answers[number + 1] = 'first'
elseif added == number and not warn_depth then
  return number
end
return answers
