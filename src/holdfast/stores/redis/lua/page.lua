-- Some sessions with their roots, where all keys are on one server. KEYS: the registry. ARGV: cursor, about how many, what
-- the name of a root begins with. Answer: the next cursor, then id after id, each with its root.
local found = redis.call('SSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local answer = {found[1]}
for _, id in ipairs(found[2]) do
  answer[#answer + 1] = id
  answer[#answer + 1] = redis.call('HGETALL', ARGV[3] .. id)
end
return answer
