-- ARGV: '1' to pause, '0' to resume.
if ARGV[1] == '1' then
  redis.call('HSET', meta, 'paused', '1')
else
  redis.call('HDEL', meta, 'paused')
  wake_somebody()
end
