-- Removes the traces of cancelled jobs from lanes that have no other. KEYS beyond the queue's own: for each lane of ARGV
-- its list and its `due` set.
for i, lane in ipairs(ARGV) do
  if redis.call('HEXISTS', lanes, lane) == 0 then
    redis.call('DEL', KEYS[OWN_KEYS + 2 * i - 1], KEYS[OWN_KEYS + 2 * i])
  end
  redis.call('SREM', idle_lanes, lane)
end
