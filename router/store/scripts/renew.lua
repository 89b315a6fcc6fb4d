-- KEYS: load, leases, held
-- ARGV: lease TTL in ms, leases
-- Returns the leases that are gone. One whose time is up but whose counts nobody has given back yet is saved.

local gone = {}
for i = 2, #ARGV do
  if parse_lease(redis.call('HGET', KEYS[3], ARGV[i])) then
    redis.call('ZADD', KEYS[2], 'GT', now_ms + tonumber(ARGV[1]), ARGV[i])
  else
    gone[#gone + 1] = ARGV[i]
  end
end
return gone
