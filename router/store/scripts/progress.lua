-- KEYS: load, held
-- ARGV: lease
-- The lease's tokens no longer wait to be prefilled; nothing where the lease is gone or has progressed before.

local lease = parse_lease(redis.call('HGET', KEYS[2], ARGV[1]))
if not lease or lease.prefill == 0 then return 0 end
local load = read_load(lease.replica)
if load and load.life == lease.life then
  load.prefill = math.max(0, load.prefill - lease.prefill)
  write_load(lease.replica, load)
end
lease.prefill = 0
redis.call('HSET', KEYS[2], ARGV[1], pack_lease(lease))
return 1
