-- KEYS: the epoch. ARGV: the id that it should have ('' if unknown), and one to give it if it has none ('' for not), or,
-- with 'anew', if it has the one expected: who still expects that one hears of it. Answer: its id and its counter, which rises with every call; '' and 0 if it is not the one expected, or missing.
redis.call('HDEL', KEYS[1], '')
local id = redis.call('HGET', KEYS[1], 'id')
if ARGV[2] ~= '' and (not id or (ARGV[3] == 'anew' and id == ARGV[1])) then
  id = ARGV[2]
  redis.call('HSET', KEYS[1], 'id', id)
end
if not id or (ARGV[1] ~= '' and ARGV[3] ~= 'anew' and id ~= ARGV[1]) then return {'', 0} end
return {id, redis.call('HINCRBY', KEYS[1], 'count', 1)}
