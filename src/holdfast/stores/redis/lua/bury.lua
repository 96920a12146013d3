-- Makes dead letters of jobs that cannot be read. KEYS beyond the queue's own: the processing hash of the session. ARGV:
-- session, ids. What is there of a job stays; its key is free. Only what the session holds is touched.
local session, processing = ARGV[1], KEYS[OWN_KEYS + 1]
processing_of[session] = processing
for i = 2, #ARGV do
  local id = ARGV[i]
  if redis.call('HEXISTS', processing, id) == 1 then
    local row = redis.call('HGET', states, id)
    local r = row and parsed(row) or unreadable(row)
    r.state, r.session = 'in_flight', session
    rows[id] = r
    carry_out(id, {to = 'failed', reason = 'permanent', raise = 0, key = 'free', wrote = r.wrote})
    r.fixed = string.match(r.fixed, '^%d+\t%d+\t%-?%d+\t[^\t]*\t')
  end
end
flush()
