-- ARGV: id, session, version, progress. Answer: `Applied`.
local row = redis.call('HGET', states, ARGV[1])
if not row then return redis.call('HEXISTS', jobs, ARGV[1]) == 1 and 'stale' or 'gone' end
local r = parsed(row)
if not r or r.state ~= 'in_flight' or r.session ~= ARGV[2] or r.version ~= ARGV[3] then return 'stale' end
if redis.call('HGET', parts, r.session) ~= '1' then return 'stale' end
redis.call('HSET', progress, ARGV[1], ARGV[4])
return 'applied'
