-- For who has taken the token: if it leaves due jobs behind, somebody else is to have it. Answer: -1 if so; otherwise in
-- how long the next one is due, or 0 if none waits.
if redis.call('HGET', meta, 'paused') then return 0 end
local first = tonumber(redis.call('ZRANGE', later, 0, 0, 'WITHSCORES')[2])
if redis.call('HLEN', lanes) == 0 and not (first and first <= now) then return first and first - now or 0 end
redis.call('HDEL', meta, '')  -- so that it is possible without memory, too: see moves.lua
wake_somebody()
return -1
