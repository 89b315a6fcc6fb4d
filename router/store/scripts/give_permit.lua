-- KEYS: permits of the tenant
-- ARGV: permit

return redis.call('ZREM', KEYS[1], ARGV[1])
