-- KEYS: permits of the tenant
-- ARGV: TTL in ms, permits
-- One that is gone is there again: its turn is under way, whatever the store has forgotten.

for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], now_ms + tonumber(ARGV[1]), ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[1]))
return 1
