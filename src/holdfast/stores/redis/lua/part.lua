-- A session's part in a queue. KEYS: ..., its heartbeat. ARGV: session, what to do ('open', 'close' or 'forget').
-- One that was closed is never opened again: a close that overtakes an opening wins.
local session = ARGV[1]
redis.call('HDEL', parts, '')
if ARGV[2] == 'open' then
  redis.call('HSETNX', parts, session, '1')
else
  redis.call('DEL', KEYS[OWN_KEYS + 1])
  if ARGV[2] == 'close' then
    redis.call('HSET', parts, session, '0')
  else
    redis.call('HDEL', parts, session)
    redis.call('SREM', holders, session)  -- where queues share a processing hash, it may still be there
  end
end
