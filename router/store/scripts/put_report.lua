-- KEYS: load, reports
-- ARGV: replica id, raw report, TTL in ms

redis.call('HSET', KEYS[2], ARGV[1], struct.pack('<Bi8', 1, now_ms + tonumber(ARGV[3])) .. ARGV[2])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[2], ARGV[3]) end
return 1
