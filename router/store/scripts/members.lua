-- KEYS: load, members, version, reports
-- Returns seconds, microseconds, membership version, members, reports; expired reports are deleted.

local reports = redis.call('HGETALL', KEYS[4])
local fresh = {}
for i = 1, #reports, 2 do
  local raw = reports[i + 1]
  local ok, _, expires = pcall(struct.unpack, '<Bi8', raw)
  if ok and string.byte(raw) == 1 and expires > now_ms then
    fresh[#fresh + 1] = reports[i]
    fresh[#fresh + 1] = raw
  else
    redis.call('HDEL', KEYS[4], reports[i])
  end
end
return {time[1], time[2], read(KEYS[3]), redis.call('HGETALL', KEYS[2]), fresh}
