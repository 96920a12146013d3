-- A whole beat, where all keys are on one server. KEYS: the root, the epoch, then for each queue that is known the keys of
-- beat.lua. ARGV: session, time to live in milliseconds, the id that the epoch should have.
-- Answer: nothing if it is not open, else what the root, each of those parts and the epoch answer.
local raised = root({KEYS[1]}, {'beat'})
if not raised then return false end
local parts = {}
for first = 3, #KEYS, 4 do
  parts[#parts + 1] = beat({unpack(KEYS, first, first + 3)}, {ARGV[1], ARGV[2]})
end
return {raised, parts, epoch({KEYS[2]}, {ARGV[3], '', ''})}
