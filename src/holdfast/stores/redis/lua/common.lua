-- In front of every script of a queue. `now` is set before it; the names of the keys are locals.
--
-- A job is its record in `jobs`, written once: run_at, then `fixed` (created_at, retention, priority, share, key), each
-- after a tab, a line end, what the client reads. A job that was ever more than enqueued has a row in `states`, too:
-- state, reason, version, session, cancel asked, ended_at, claimed_at, run_at, fixed; then, opaque, what its moves wrote.
-- So the row of a job that was claimed for the first time ends with the first line of its record.
-- Numbers are exact up to 2^53, as microseconds the year 2255. What somebody else wrote there may not be like that: then
-- there is nothing to be read, and only that job is the worse for it.

local RECORD = '^(%d+)\t((%d+)\t%d+\t%-?%d+\t[^\t\n]*\t[^\n]*)\n'
local ROW = '^([^\t]+)\t([^\t]+)\t(%d+)\t([^\t]*)\t(%d)\t(%d*)\t(%d*)\t(%d+)\t(%d+\t%d+\t%-?%d+\t[^\t\n]*\t[^\n]*)\n(.*)$'
local FIXED = '^%d+\t(%d+)\t(%-?%d+)\t([^\t]*)\t(.*)$'

local function whole(number) return string.format('%.0f', number) end

local function parsed(row)  -- nil: it cannot be read
  local r = {}
  r.state, r.reason, r.version, r.session, r.cancel, r.ended_at, r.claimed_at, r.run_at, r.fixed, r.wrote =
    string.match(row, ROW)
  return r.state and r
end

local function as_enqueued(record)  -- nil: it cannot be read
  local run_at, fixed, created_at = string.match(record, RECORD)
  return run_at and {state = 'ready', reason = 'enqueued', version = '0', session = '', cancel = '0', run_at = run_at,
          created_at = created_at, claimed_at = '', ended_at = '', fixed = fixed, wrote = ''}
end

-- What stands for a job that cannot be read, so that it can be moved. Its row is kept as it was, if it has one.
local function unreadable(row)
  return {state = 'ready', reason = 'enqueued', version = '0', session = '', cancel = '0', run_at = whole(now),
          claimed_at = '', ended_at = '', fixed = '0\t0\t0\t\t', wrote = row and 'unreadable\n' .. row or ''}
end

local function row_of(r)
  return table.concat({r.state, r.reason, r.version, r.session, r.cancel, r.ended_at, r.claimed_at, r.run_at, r.fixed},
                      '\t') .. '\n' .. r.wrote
end
