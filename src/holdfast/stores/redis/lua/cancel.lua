-- ARGV: ids. Answer: `CancelAnswer` for each.
local answers = {}
for i, id in ipairs(ARGV) do
  local r = read(id)
  if not r then
    answers[i] = 'gone'
  elseif r.state == 'ready' then
    carry_out(id, {to = 'cancelled', reason = 'cancelled', raise = 0, key = 'free', wrote = r.wrote})
    answers[i] = 'cancelled'
  elseif r.state == 'in_flight' then
    r.cancel, r.changed = '1', true
    redis.call('SADD', cancels, id)
    answers[i] = 'asked'
  else
    answers[i] = 'ended'
  end
end
flush()
return answers
