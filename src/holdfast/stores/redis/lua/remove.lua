-- Removes ended jobs, each once: its row is there until `flush_removed` makes the writes. `by_state` counts them.
local removed, by_state, gone = {}, {}, {}
local function remove(id, state)
  if gone[id] then return end
  gone[id] = true
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
