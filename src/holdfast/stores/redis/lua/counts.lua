-- Answer: ready (due), scheduled, in flight, succeeded, failed, cancelled, paused.
local tally = redis.call('HMGET', meta, 'waiting', 'in_flight', 'succeeded', 'failed', 'cancelled', 'paused')
local scheduled = redis.call('ZCOUNT', later, '(' .. whole(now), '+inf')
return {(tonumber(tally[1]) or 0) - scheduled, scheduled, tonumber(tally[2]) or 0, tonumber(tally[3]) or 0,
        tonumber(tally[4]) or 0, tonumber(tally[5]) or 0, tally[6] and 1 or 0}
