-- The short way for one new job that is due now, has no key and meets no limit: what `insert` does with it, and no more.
-- KEYS beyond the queue's own: the list of its lane. ARGV: the lane ("priority, tab, share"), id, the record without its
-- times. Answer: 1 if it was created; 0 if nothing was written, because there is more to it: `insert` says what.
-- Half of what this script takes is Lua: each name is looked up once, and numbers are handed over as text, because Redis
-- writes those of Lua with 17 digits. Times not by %d: where the server's words have 32 bits, that ends at 2^31.
local call, format, lane, id = redis.call, string.format, ARGV[1], ARGV[2]
local known = call('HMGET', meta, 'waiting', 'pushed')
local waiting = tonumber(known[1])
if not waiting or now <= tonumber(known[2] or 0) or call('ZADD', index, '0', id) == 0 then return 0 end
local at = format('%.0f', now)
call('HSET', jobs, id, at .. '\t' .. at .. '\t' .. ARGV[3])
call('HSET', meta, 'waiting', format('%d', waiting + 1), 'pushed', at)
call('RPUSH', KEYS[OWN_KEYS + 1], id)
call('HINCRBY', lanes, lane, '1')
wake_somebody()
return 1
