-- KEYS: permits of the tenant, its rate
-- ARGV: permit, turns at once (-1: no limit), turns per minute (-1: no limit), TTL of the permit in ms
-- Returns {}, or {limit, microseconds to wait}. What was denied has used nothing up.

local permit, concurrent, rate, ttl_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local known = false
if concurrent >= 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
  known = redis.call('ZSCORE', KEYS[1], permit)
  if not known and redis.call('ZCARD', KEYS[1]) >= concurrent then return {'concurrent', '0'} end
end
if rate > 0 and not known then
  local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local moved_us = math.max(read_number(KEYS[2]), now_us) + math.floor(60000000 / rate)
  local early_us = moved_us - now_us - 60000000
  if early_us > 0 then return {'rate', integer(early_us)} end
  redis.call('SET', KEYS[2], integer(moved_us), 'PX', integer(math.ceil((moved_us - now_us) / 1000)))
end
if concurrent >= 0 then
  redis.call('ZADD', KEYS[1], now_ms + ttl_ms, permit)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
end
return {}
