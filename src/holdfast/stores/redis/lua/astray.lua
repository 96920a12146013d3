-- Where a search for lost jobs must look, where all keys are on one server. KEYS: the registry of queues. ARGV: what the
-- names of a queue's keys and of a root begin with. Answer: the queues in which a session holds jobs, or has an open part
-- though its root is closed; and those for which there was no time here.
local found, looked = {}, 0
local function worth(queue)
  local own = ARGV[1] .. '{' .. queue .. '}:'
  if looked >= MOST_LOOKED then return true end
  looked = looked + 1
  if redis.call('EXISTS', own .. 'holders') == 1 then return true end
  looked = looked + redis.call('HLEN', own .. 'parts')
  if looked > MOST_LOOKED then return true end
  local parts = redis.call('HGETALL', own .. 'parts')
  for i = 1, #parts, 2 do
    if parts[i + 1] == '1' and redis.call('HGET', ARGV[2] .. parts[i], 'open') ~= '1' then return true end
  end
  return false
end
for _, queue in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if worth(queue) then found[#found + 1] = queue end
end
return found
