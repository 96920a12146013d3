-- Removes ended jobs. `by_state` counts them; `flush_removed` makes the writes.
local removed, by_state = {}, {}
local function remove(id, state)
  removed[#removed + 1] = id
  by_state[state] = (by_state[state] or 0) + 1
end
local function flush_removed()
  if #removed == 0 then return end
  redis.call('HDEL', jobs, unpack(removed))
  redis.call('HDEL', states, unpack(removed))
  redis.call('HDEL', progress, unpack(removed))
  redis.call('ZREM', index, unpack(removed))
  redis.call('ZREM', dead, unpack(removed))
  for state, number in pairs(by_state) do redis.call('HINCRBY', meta, state, -number) end
end
