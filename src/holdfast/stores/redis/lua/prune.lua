-- ARGV: how many rows at most. Answer: how many ended jobs and keys were removed whose time is over.
redis.call('HDEL', meta, '')
local most = tonumber(ARGV[1])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', whole(now), 'LIMIT', 0, most)) do
  local row = redis.call('HGET', states, id)
  remove(id, row and string.match(row, '^[^\t]+') or 'succeeded')
end
flush_removed()
local over = redis.call('ZRANGEBYSCORE', key_expiry, '-inf', whole(now), 'LIMIT', 0, most - #removed)
if #over > 0 then
  redis.call('HDEL', keys, unpack(over))
  redis.call('ZREM', key_expiry, unpack(over))
end
return #removed + #over
