-- KEYS: a registry. ARGV: '1' if there may be one name only, then names to enter in it. Answer: the others that are in the
-- way; if there are any, none was entered. Possible without memory, too: see moves.lua.
redis.call('SREM', KEYS[1], '')
if ARGV[1] == '1' then
  local others, wanted = {}, {}
  for i = 2, #ARGV do wanted[ARGV[i]] = true end
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    if not wanted[name] then others[#others + 1] = name end
  end
  if #others > 0 or #ARGV > 2 then return others end
end
redis.call('SADD', KEYS[1], unpack(ARGV, 2))
return {}
