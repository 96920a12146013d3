-- ARGV: how many rows at most. Answer: how many ended jobs and keys were removed whose time is over, and 1 if there may be
-- more. An entry of `expiry` holds the ids of jobs that ended together. Some may be gone since, others have moved on, and
-- have another entry if they ended again: the row decides.
redis.call('HDEL', meta, '')
local most, looked = tonumber(ARGV[1]), 0
local function over(row)  -- the state of a job that is to be removed
  local state = string.match(row, '^[^\t]+')
  if state ~= 'succeeded' and state ~= 'cancelled' then return nil end
  local r = parsed(row)
  return (not r or (tonumber(r.ended_at) or 0) + string.match(r.fixed, FIXED) <= now) and state
end
local entries = redis.call('ZRANGEBYSCORE', expiry, '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, most)
for i = 1, #entries, 2 do
  if #removed >= most or looked >= MOST_LOOKS * most then break end
  local left = {}
  for id in string.gmatch(entries[i], '[^ ]+') do
    if #removed < most and looked < MOST_LOOKS * most then
      looked = looked + 1
      local row = redis.call('HGET', states, id)
      local state = row and over(row)
      if state then remove(id, state) end
    else
      left[#left + 1] = id
    end
  end
  redis.call('ZREM', expiry, entries[i])
  if #left > 0 then redis.call('ZADD', expiry, entries[i + 1], table.concat(left, ' ')) end
end
flush_removed()
local ended = {}
if #removed < most then
  ended = redis.call('ZRANGEBYSCORE', key_expiry, '-inf', whole(now), 'LIMIT', 0, most - #removed)
end
if #ended > 0 then
  redis.call('HDEL', keys, unpack(ended))
  redis.call('ZREM', key_expiry, unpack(ended))
end
local more = #removed + #ended >= most or looked >= MOST_LOOKS * most or #entries == 2 * most
return {#removed + #ended, more and 1 or 0}
