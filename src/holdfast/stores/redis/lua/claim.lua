-- ARGV: session, limit, turn, '1' to serve the lanes known although there are others, then the lanes that the client
-- knows ("priority, tab, share"). KEYS beyond the queue's own: the session's processing hash, then for each of these
-- lanes its list and its `due` set. Answer: 'closed'; 'again'; 'lanes' and all that have jobs; or 'jobs', now, in how long
-- the next is due (-1: none waits), how many lanes have jobs, and id, record and row of each job. A job that was never
-- claimed before has no row there: it is in flight as its record says, with version 1, since now.
--
-- A lane's list holds the jobs that were due when they came, in that order; its `due` set holds those that came back or
-- were delayed. Both are ordered by (run_at, id), so the lane's next job is the first of the two. What was cancelled
-- meanwhile leaves a trace in them, which is dropped here: an entry in a list is good if its job was due when it came and
-- has not moved since, one in a set if its time is the job's. `lanes` counts the jobs that are in line.
local session, limit, turn, serve = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'
if redis.call('HGET', parts, session) ~= '1' then return {'closed'} end
if redis.call('HGET', meta, 'paused') then return {'jobs', now, -1, 0} end

local known = {}
for i = 5, #ARGV do
  local place = OWN_KEYS + 2 * (i - 4)
  -- Of a job that is as it was enqueued, and was due then: what its row takes over from its record.
  local fresh = '^((%d+)\t%2\t%d+\t' .. string.gsub(ARGV[i], '[^%w\t]', '%%%0') .. '\t[^\n]*\n)'
  known[ARGV[i]] = {text = ARGV[i], list = KEYS[place], due = KEYS[place + 1], fresh = fresh}
end

local function every_lane(becoming_due)
  local every = redis.call('HKEYS', lanes)
  for lane in pairs(becoming_due) do every[#every + 1] = lane end
  return {'lanes', every}
end

-- What has become due goes into its lane. (run_at, id) is its place there, so nothing is overtaken.
local promoted = redis.call('ZRANGEBYSCORE', later, '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, MOST_PROMOTED)
local into, gone, missing = {}, {}, false
for i = 1, #promoted, 2 do
  local id, lane = string.match(promoted[i], '^([^\t]+)\t(%-?%d+\t[^\t]*)$')
  if lane then  -- anything else was put there by somebody else
    into[lane] = into[lane] or {}
    table.insert(into[lane], promoted[i + 1])
    table.insert(into[lane], id)
  end
  if lane and not known[lane] then missing = true else gone[#gone + 1] = promoted[i] end
end
if missing and not serve then return every_lane(into) end
if #gone > 0 then
  redis.call('ZREM', later, unpack(gone))
  for lane, entries in pairs(into) do
    if known[lane] then
      redis.call('ZADD', known[lane].due, unpack(entries))  -- over a trace, if there is one: that was not counted
      redis.call('HINCRBY', lanes, lane, #entries / 2)
    end
  end
  if #gone == MOST_PROMOTED then return {'again'} end
end

local waiting, groups = redis.call('HGETALL', lanes), {}
for i = 1, #waiting, 2 do
  local lane = known[waiting[i]]
  if not lane and not serve then return every_lane({}) end
  missing = missing or not lane
  lane = lane or {text = waiting[i], unknown = true}
  local priority, share = string.match(lane.text, '^(%-?%d+)\t(.*)$')
  lane.priority, lane.share, lane.waiting = tonumber(priority), share, tonumber(waiting[i + 1])
  lane.before = lane.waiting
  if not lane.unknown then
    groups[lane.priority] = groups[lane.priority] or {}
    table.insert(groups[lane.priority], lane)
  end
end

local function rotated(items, by)
  local out = {}
  for i = 0, #items - 1 do out[#out + 1] = items[(i + by) % #items + 1] end
  return out
end

local function serving_order()  -- lanes.serving_order
  local round, place = math.floor(turn / 16), turn % 16
  local inverted, priorities, ordered = place == 15, {}, {}
  for priority in pairs(groups) do priorities[#priorities + 1] = priority end
  table.sort(priorities, function(a, b) if inverted then return a > b end return a < b end)
  local beginners = math.max(1, #priorities - 1)
  local rotation = inverted and math.floor(round / beginners) or turn - round
  for i, priority in ipairs(rotated(priorities, inverted and round % beginners or 0)) do
    table.sort(groups[priority], function(a, b) return a.share < b.share end)
    ordered[i] = rotated(groups[priority], rotation)
  end
  return ordered
end

-- The first `most` entries of a lane with both, taken out, and the times of those that are from the `due` set.
local function merged(lane, most)
  local came = redis.call('LRANGE', lane.list, 0, most - 1)
  local back = redis.call('ZRANGE', lane.due, 0, most - 1, 'WITHSCORES')
  local records = #came > 0 and redis.call('HMGET', jobs, unpack(came)) or {}
  local out, times, leave, c, b = {}, {}, {}, 1, 1
  while #out < most and (came[c] or back[b]) do
    local at = came[c] and tonumber(records[c] and string.match(records[c], '^%d+') or 0)
    local its = back[b] and tonumber(back[b + 1])
    if at and (not its or at < its or (at == its and came[c] < back[b])) then
      out[#out + 1] = came[c]
      c = c + 1
    else
      out[#out + 1], leave[#leave + 1], times[#out + 1] = back[b], back[b], its
      b = b + 2
    end
  end
  if c > 1 then redis.call('LPOP', lane.list, c - 1) end
  if #leave > 0 then redis.call('ZREM', lane.due, unpack(leave)) end
  return out, times
end

local out, written, held, has, budget, bytes, taken = {'jobs', now, -1, 0}, {}, {}, {}, limit + MOST_TRACES, 0, 0
local FRESH = 'in_flight\tclaimed\t1\t' .. session .. '\t0\t\t' .. whole(now) .. '\t'

local function give(id, record, row, version, told)
  written[2 * taken + 1], written[2 * taken + 2] = id, row
  held[2 * taken + 1], held[2 * taken + 2] = id, version
  out[3 * taken + 5], out[3 * taken + 6], out[3 * taken + 7] = id, record, told
  taken, bytes, has[id] = taken + 1, bytes + #record, true
  return true
end

local function take(lane, id, record, row, time)
  if not record or has[id] then return false end  -- a trace, and the job itself, may both be here
  local r
  if row then
    if not time or string.sub(row, 1, 6) ~= 'ready\t' then return false end
    r = parsed(row)
  elseif not time then
    local head = string.match(record, lane.fresh)
    if head then return give(id, record, FRESH .. head, '1', false) end
    r = as_enqueued(record)
    if r and r.run_at ~= r.created_at then return false end
  else
    r = as_enqueued(record)
  end
  if r and time and tonumber(r.run_at) ~= time then return false end
  if r and string.match(r.fixed, '^%d+\t%d+\t(%-?%d+\t[^\t]*)\t') ~= lane.text then return false end  -- its id was used again
  r = r or unreadable(row)  -- the client cannot read it either, and buries it
  r.state, r.reason, r.session, r.claimed_at, r.version = 'in_flight', 'claimed', session, whole(now), whole(r.version + 1)
  row = row_of(r)
  return give(id, record, row, r.version, row)
end

local function pull(lane, most)
  local got = 0
  while got < most and budget > 0 and bytes < MOST_BYTES do
    local want, ids, times = most - got, nil, {}
    if taken == 0 then
      want = math.min(want, 16)  -- records may be large: look at some before taking many
    else
      want = math.max(1, math.min(want, math.floor((MOST_BYTES - bytes) / (bytes / taken + 1))))
    end
    if redis.call('ZCARD', lane.due) > 0 then
      ids, times = merged(lane, want)
    else
      ids = redis.call('LPOP', lane.list, want)
    end
    if not ids or #ids == 0 then  -- whatever the count says
      lane.waiting = got
      break
    end
    local records, states_of = redis.call('HMGET', jobs, unpack(ids)), redis.call('HMGET', states, unpack(ids))
    for i, id in ipairs(ids) do
      if take(lane, id, records[i], states_of[i], times[i]) then got = got + 1 end
    end
    budget = budget - #ids
  end
  lane.waiting = lane.waiting - got
  return got
end

for _, group in ipairs(serving_order()) do  -- lanes.draw
  local at = group
  while #at > 0 and taken < limit and budget > 0 and bytes < MOST_BYTES do
    local quota, more = math.ceil((limit - taken) / #at), {}
    for _, lane in ipairs(at) do
      local asked = math.min(quota, limit - taken)
      if asked > 0 then
        local got = pull(lane, asked)
        if got == asked then more[#more + 1] = lane end
      end
    end
    at = more
  end
end

local left = false
for _, group in pairs(groups) do
  for _, lane in ipairs(group) do
    if lane.waiting <= 0 then
      redis.call('HDEL', lanes, lane.text)
    else
      left = true
      if lane.waiting ~= lane.before then redis.call('HSET', lanes, lane.text, lane.waiting) end
    end
  end
end
if taken > 0 then
  redis.call('HSET', states, unpack(written))
  redis.call('HSET', KEYS[OWN_KEYS + 1], unpack(held))
  redis.call('SADD', holders, session)
  redis.call('HINCRBY', meta, 'waiting', -taken)
  redis.call('HINCRBY', meta, 'in_flight', taken)
  if redis.call('EXISTS', progress) == 1 then
    for id in pairs(has) do redis.call('HDEL', progress, id) end
  end
end
local due_in = -1
if taken == limit or left or missing then
  due_in = 0
  if left or missing then wake_somebody() end
else
  redis.call('DEL', wake)
  local first = redis.call('ZRANGE', later, 0, 0, 'WITHSCORES')[2]
  if first then due_in = math.max(0, first - now) end
end
out[3], out[4] = due_in, #waiting / 2
return out
