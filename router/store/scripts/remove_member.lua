-- KEYS: load, members, version, beliefs
-- ARGV: replica id
-- Returns 1, or 0 where it was no member. Its load and beliefs go in any case.

redis.call('HLEN', KEYS[1])
redis.call('HLEN', KEYS[4])
local removed = redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
if removed == 1 then
  redis.call('SET', KEYS[3], integer(read_number(KEYS[3]) + 1))
end
return removed
