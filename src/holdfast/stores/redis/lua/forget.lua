-- ARGV: ids. Answer: how many ended jobs were removed.
redis.call('HDEL', meta, '')
for _, id in ipairs(ARGV) do
  local row = redis.call('HGET', states, id)
  local state = row and string.match(row, '^[^\t]+')
  if state == 'succeeded' or state == 'failed' or state == 'cancelled' then remove(id, state) end
end
flush_removed()
return #removed
