-- ARGV: '1' to pause, '0' to resume.
redis.call('HDEL', meta, '')  -- so that the writes below are possible without memory, too: see moves.lua
if ARGV[1] == '1' then
  redis.call('HSET', meta, 'paused', '1')
else
  redis.call('HDEL', meta, 'paused')
  wake_somebody()
end
