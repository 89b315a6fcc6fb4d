-- KEYS: load, members, version
-- ARGV: replica id, member as JSON, 1 to leave one that is there, the member expected there as JSON or ''
-- Returns 1, or 0 where nothing was changed. An identical member changes nothing.

local function parsed(raw)
  local fine, member = pcall(cjson.decode, raw or '')
  return fine and type(member) == 'table' and member.id == ARGV[1] and member or nil
end

-- Whether `found` says what `expected` says: by value, since another version, or a hand, may have spelt it otherwise.
local function says(found, expected)
  if type(expected) ~= 'table' or type(found) ~= 'table' then return found == expected end
  if #found ~= #expected then return false end
  for key, value in pairs(expected) do
    if not says(found[key], value) then return false end
  end
  return true
end

local old = redis.call('HGET', KEYS[2], ARGV[1])
local found = parsed(old)
if ARGV[3] == '1' and found then return 0 end
if ARGV[4] ~= '' and not (found and says(found, cjson.decode(ARGV[4]))) then return 0 end
if old ~= ARGV[2] then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
  redis.call('SET', KEYS[3], integer(read_number(KEYS[3]) + 1))
end
return 1
