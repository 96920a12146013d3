-- KEYS: ..., the session's processing hash and its heartbeat. ARGV: session, time to live in milliseconds.
-- Answer: whether its part is open, how many jobs it holds here, which of them are to be cancelled.
local session = ARGV[1]
redis.call('HDEL', parts, '')  -- so that the write below is possible without memory, too: see moves.lua
redis.call('HSETNX', parts, session, '1')  -- the root is open; only a close makes it 0, and that stays
local open = redis.call('HGET', parts, session) == '1'
local held = redis.call('HLEN', KEYS[OWN_KEYS + 1])
if open then redis.call('SET', KEYS[OWN_KEYS + 2], 'holds ' .. held .. ' jobs', 'PX', ARGV[2]) end
local asked = {}
for _, id in ipairs(redis.call('SMEMBERS', cancels)) do
  if redis.call('HEXISTS', KEYS[OWN_KEYS + 1], id) == 1 then asked[#asked + 1] = id end
end
return {open and 1 or 0, held, asked}
