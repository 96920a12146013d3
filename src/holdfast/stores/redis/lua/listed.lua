-- A job as answers list it: id, record, row, progress.
local function list(out, id, record, row)
  out[#out + 1] = id
  out[#out + 1] = record
  out[#out + 1] = row
  out[#out + 1] = redis.call('HGET', progress, id)
end
