-- ARGV: below which id ('' for the newest), how many at most, how many to look at, the states ('' for any). KEYS: ... .
-- Answer: the id down to which it has looked ('' when there are no more), then id, record, row, progress of each job.
local below, most, looks, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local source = wanted == 'failed' and dead or index
local ids = redis.call('ZREVRANGEBYLEX', source, below == '' and '+' or '(' .. below, '-', 'LIMIT', 0, looks)
local out, down_to = {''}, #ids == looks and ids[#ids] or ''
for _, id in ipairs(ids) do
  local record, row = redis.call('HGET', jobs, id), redis.call('HGET', states, id)
  local state = row and string.match(row, '^[^\t]+') or 'ready'
  if (record or row) and (wanted == '' or string.find(wanted, state, 1, true)) then
    if #out > 4 * most then
      down_to = out[#out - 3]
      break
    end
    list(out, id, record, row)
  end
end
out[1] = down_to
return out
