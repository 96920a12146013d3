-- ARGV: ids. Answer: id, record, row, progress of each that is there.
local out = {}
for _, id in ipairs(ARGV) do
  local record, row = redis.call('HGET', jobs, id), redis.call('HGET', states, id)
  if record or row then
    out[#out + 1] = id
    out[#out + 1] = record
    out[#out + 1] = row
    out[#out + 1] = redis.call('HGET', progress, id)
  end
end
return out
