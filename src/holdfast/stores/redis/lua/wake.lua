-- One token at most lies in `wake`: who waits takes it, and puts another there if it leaves jobs behind.
local function wake_somebody()
  if redis.call('EXISTS', wake) == 0 then redis.call('RPUSH', wake, '1') end
end
