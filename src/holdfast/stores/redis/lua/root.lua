-- The root of a session decides whether it is open. KEYS: the root. ARGV: what to do, then what that takes.
local root, verb = KEYS[1], ARGV[1]
redis.call('HDEL', root, '')  -- so that the writes below are possible without memory, too: see moves.lua
local open = redis.call('HGET', root, 'open')
if verb == 'open' then  -- host, pid, queues
  if not open then
    redis.call('HSET', root, 'open', '1', 'beat', '0', 'opened_at', string.format('%.0f', now), 'beat_at',
               string.format('%.0f', now), 'host', ARGV[2], 'pid', ARGV[3], 'queues',
               table.concat(ARGV, '\t', 4))
  end
  if open ~= '0' then  -- before it gets its parts: a close must reach them
    for i = 4, #ARGV do redis.call('HSET', root, 'queue:' .. ARGV[i], '1') end
  end
  return open ~= '0' and 1 or 0
elseif verb == 'join' then  -- queue: from now on a close reaches that queue, too
  if open ~= '1' then return 0 end
  redis.call('HSET', root, 'queue:' .. ARGV[2], '1')
  return 1
elseif verb == 'beat' then
  if open ~= '1' then return false end
  redis.call('HSET', root, 'beat_at', string.format('%.0f', now))
  return {redis.call('HINCRBY', root, 'beat', 1), redis.call('HKEYS', root)}
elseif verb == 'close' then  -- the beat that it must still have, or ''
  if open ~= '1' or (ARGV[2] ~= '' and redis.call('HGET', root, 'beat') ~= ARGV[2]) then
    return {0, open == '0' and redis.call('HKEYS', root) or {}}
  end
  redis.call('HSET', root, 'open', '0', 'beat_at', string.format('%.0f', now))
  return {1, redis.call('HKEYS', root)}
elseif verb == 'expire' then  -- for how long a closed session is kept
  if not open then return 1 end
  if open ~= '0' or (tonumber(redis.call('HGET', root, 'beat_at') or 0) or 0) + ARGV[2] > now then return 0 end
  redis.call('DEL', root)
  return 1
end
