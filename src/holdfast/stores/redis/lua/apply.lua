-- KEYS beyond the queue's own: the processing hashes of the sessions named in ARGV. ARGV: how many sessions, each, then
-- for each move: id, header, what it wrote, how many jobs follow; for each of these: id, when, key, body, outbox.
-- `outbox` is '' for a job of this queue, otherwise the job for whoever delivers it. Answer: `Applied` for each move.
local HEADER = '^(%d+)\t([^\t]*)\t(%d?)\t(%d)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t(%d*)\t(%d)\t(%l+)$'

local function judge(m, r)  -- lifecycle.judge
  if not r then return 'gone' end
  local own = m.session == '' or r.session == m.session
  if own and r.state == m.to and r.reason == m.reason and tonumber(r.version) == m.version + m.raise then
    return 'already'
  end
  if not (own and string.find(m.sources, r.state, 1, true) and tonumber(r.version) == m.version) then return 'stale' end
  if m.session_open ~= '' then
    local open = redis.call('HGET', parts, r.session) == '1' and '1' or '0'
    if open ~= m.session_open then return 'stale' end
  end
  if r.cancel == '1' and m.despite_cancel == '0' then return 'cancel_asked' end
  return 'applied'
end

-- A job that follows: accepted with the move, unless its id or its key is there.
local function follow(id, due, key, body)
  local window, hash, text = string.match(key, '^(%d+)\t([^\t]*)\t(.*)$')
  if redis.call('HEXISTS', jobs, id) == 1 then return end
  if text then
    local holder, over = key_holder(text)
    if holder and not over then return end
    local expires_at = whole(now + window)
    redis.call('HSET', keys, text, expires_at .. '\t' .. id .. '\t' .. hash)
    redis.call('ZADD', key_expiry, expires_at, text)
  end
  local run_at = string.sub(due, 1, 1) == '+' and now + string.sub(due, 2) or math.max(now, string.sub(due, 2))
  redis.call('HSET', jobs, id, whole(run_at) .. '\t' .. whole(now) .. '\t' .. body)
  redis.call('ZADD', index, 0, id)
  local priority, share = string.match(body, '^%d+\t(%-?%d+)\t([^\t]*)\t')
  line_up(id, whole(run_at), priority .. '\t' .. share)
end

local sessions = tonumber(ARGV[1])
for i = 1, sessions do processing_of[ARGV[1 + i]] = KEYS[OWN_KEYS + i] end

local ids, i = {}, 2 + sessions
while i <= #ARGV do
  ids[#ids + 1] = ARGV[i]
  i = i + 4 + 5 * ARGV[i + 3]
end
read_rows(ids)

local answers = {}
i = 2 + sessions
while i <= #ARGV do
  local id, header, wrote, following = unpack(ARGV, i, i + 3)
  local m = {wrote = wrote}
  m.version, m.session, m.session_open, m.despite_cancel, m.sources, m.to, m.reason, m.delay, m.raise, m.key =
    string.match(header, HEADER)
  m.version, m.raise, m.delay = tonumber(m.version), tonumber(m.raise), tonumber(m.delay)
  local answer = judge(m, read(id))
  if answer == 'applied' and not carry_out(id, m) then answer = 'key_taken' end
  answers[#answers + 1] = answer
  for j = 1, following do
    local at = i + 4 + 5 * (j - 1)
    if answer == 'applied' then
      if ARGV[at + 4] == '' then
        follow(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
      else
        redis.call('HSET', outbox, ARGV[at], ARGV[at + 4])
      end
    end
  end
  i = i + 4 + 5 * following
end
flush()
return answers
