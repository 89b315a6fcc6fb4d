-- KEYS: load, held
-- ARGV: lease
-- The lease's tokens no longer wait to be prefilled; nothing where the lease is gone or has progressed before.

local lease = parse_lease(redis.call('HGET', KEYS[2], ARGV[1]))
if lease then progress(KEYS[2], ARGV[1], lease) end
return 1
