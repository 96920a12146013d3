-- ARGV: ids. Answer: id, record, row, progress of each that is there.
local out = {}
for _, id in ipairs(ARGV) do
  local record, row = redis.call('HGET', jobs, id), redis.call('HGET', states, id)
  if record or row then list(out, id, record, row) end
end
return out
