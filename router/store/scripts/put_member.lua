-- KEYS: load, members, version
-- ARGV: replica id, member as JSON, 1 to leave one that is there
-- Returns 1, or 0 where it was left. An identical member changes nothing.

local old = redis.call('HGET', KEYS[2], ARGV[1])
local fine, parsed = pcall(cjson.decode, old or '')
if ARGV[3] == '1' and fine and type(parsed) == 'table' and parsed.id == ARGV[1] then return 0 end
if old ~= ARGV[2] then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
  redis.call('SET', KEYS[3], integer(read_number(KEYS[3]) + 1))
end
return 1
