-- KEYS beyond the queue's own: the processing hashes of the sessions. ARGV: how many jobs at most, 'held' or 'lost', the
-- sessions. Answer: id, record, row, progress of each job; with 'lost' only of sessions whose part is not open.
local out, most = {}, tonumber(ARGV[1])
for i = 3, #ARGV do
  if ARGV[2] == 'held' or redis.call('HGET', parts, ARGV[i]) ~= '1' then
    for _, id in ipairs(redis.call('HKEYS', KEYS[OWN_KEYS + i - 2])) do
      local row = #out < 4 * most and redis.call('HGET', states, id)
      if row then list(out, id, redis.call('HGET', jobs, id), row) end  -- several queues may share one hash
    end
  end
end
return out
