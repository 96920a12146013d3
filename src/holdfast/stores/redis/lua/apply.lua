-- KEYS beyond the queue's own: the processing hashes of the sessions named in ARGV. ARGV: how many sessions, each, then
-- groups of moves that differ in their job only: header, what they wrote, how many jobs, their ids, how many jobs follow
-- (then the group has one move); for each of these: id, when, key, body, outbox. `outbox` is '' for a job of this queue,
-- otherwise the job for whoever delivers it. Answer: how many moves there were if all are applied; otherwise `Applied` for
-- each.
local HEADER = '^(%d+)\t([^\t]*)\t(%d?)\t(%d)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t(%d*)\t(%d)\t(%l+)$'
local CLAIMED = '^0\t\t(%d*\t%d+\t%d+\t(%d+)\t[^\n]*\n)'  -- a row from `cancel` on, of a claim that nobody wants to cancel

local openness = {}
local function is_open(session)
  local open = openness[session]
  if open == nil then
    open = redis.call('HGET', parts, session) == '1'
    openness[session] = open
  end
  return open
end

local function judge(m, r)  -- lifecycle.judge
  if not r then return 'gone' end
  local own = m.session == '' or r.session == m.session
  if own and r.state == m.to and r.reason == m.reason and tonumber(r.version) == m.version + m.raise then
    return 'already'
  end
  if not (own and string.find(m.sources, r.state, 1, true) and r.version == m.version) then return 'stale' end
  if m.session_open ~= '' then
    if (is_open(r.session) and '1' or '0') ~= m.session_open then return 'stale' end
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

local answers, refused, settled = {}, false, {}

local function move(m, id, row)
  local answer = judge(m, read(id, settled[id] or row))
  if answer == 'applied' and not carry_out(id, m) then answer = 'key_taken' end
  refused = refused or answer ~= 'applied'
  answers[#answers + 1] = answer
  return answer
end

-- What almost every move is: a claim of an open session has succeeded. Its row need not be taken apart, since the end of
-- it stays as it is. What turns out to be more than that is left to `move`; so is a job that was moved before in this
-- script.
local function succeed(m, ids, found)
  local before = table.concat({'in_flight', 'claimed', m.version, m.session, ''}, '\t')
  local after = table.concat({m.to, m.reason, m.version, m.session, '0', whole(now), ''}, '\t')
  local from, number = #before + 1, 0
  for i, id in ipairs(ids) do
    local row, rest, retention = found[i], nil, nil
    if row and not settled[id] and not rows[id] and string.sub(row, 1, from - 1) == before then
      rest, retention = string.match(row, CLAIMED, from)
    end
    if rest then
      row = after .. rest .. m.wrote
      settled[id], number = row, number + 1
      written[#written + 1] = id
      written[#written + 1] = row
      added(let_go, m.session, id)
      added(expires, retention, id)
      completed_ids[#completed_ids + 1] = id
      answers[#answers + 1] = 'applied'
    else
      move(m, id, row)
    end
  end
  count('in_flight', -number)
  count(m.to, number)
end

local i = 2 + sessions
while i <= #ARGV do
  local m, number, ids = {wrote = ARGV[i + 1]}, tonumber(ARGV[i + 2]), {}
  m.version, m.session, m.session_open, m.despite_cancel, m.sources, m.to, m.reason, m.delay, m.raise, m.key =
    string.match(ARGV[i], HEADER)
  m.raise, m.delay = tonumber(m.raise), tonumber(m.delay)
  for j = 1, number do ids[j] = ARGV[i + 2 + j] end
  i = i + 3 + number
  local following = tonumber(ARGV[i])
  i = i + 1
  local found = redis.call('HMGET', states, unpack(ids))
  if m.to == 'succeeded' and m.sources == 'in_flight' and m.session ~= '' and m.session_open == '1'
     and m.raise == 0 and m.key == 'keep' and not m.delay and following == 0 and is_open(m.session) then
    succeed(m, ids, found)
  else
    for j, id in ipairs(ids) do
      local answer = move(m, id, found[j])
      for at = i, i + 5 * following - 1, 5 do
        if answer == 'applied' then
          if ARGV[at + 4] == '' then
            follow(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
          else
            redis.call('HSET', outbox, ARGV[at], ARGV[at + 4])
          end
        end
      end
    end
  end
  i = i + 5 * following
end
flush()
return refused and answers or #answers
