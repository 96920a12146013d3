-- KEYS: a registry. ARGV: names to enter in it. Possible without memory, too: see moves.lua.
redis.call('SREM', KEYS[1], '')
redis.call('SADD', KEYS[1], unpack(ARGV))
