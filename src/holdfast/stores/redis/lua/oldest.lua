-- KEYS beyond the queue's own: for each lane its list and its `due` set. Answer: now, and when the job that was due
-- first is or was due; -1 if none waits. Both are in the order of time; a list may begin with traces (see claim.lua).
local oldest = tonumber(redis.call('ZRANGE', later, 0, 0, 'WITHSCORES')[2] or -1)
local function look(run_at)
  run_at = tonumber(run_at)
  if run_at and (oldest < 0 or run_at < oldest) then oldest = run_at end
end
local function first_of(list)
  for from = 0, 9900, 100 do
    local ids = redis.call('LRANGE', list, from, from + 99)
    for _, id in ipairs(ids) do
      local record = redis.call('HEXISTS', states, id) == 0 and redis.call('HGET', jobs, id)
      if record then return string.match(record, '^%d+') end
    end
    if #ids < 100 then return nil end
  end
end
for i = OWN_KEYS + 1, #KEYS, 2 do
  look(redis.call('ZRANGE', KEYS[i + 1], 0, 0, 'WITHSCORES')[2])
  look(first_of(KEYS[i]))
end
return {now, oldest}
