-- KEYS: load, beliefs, leases, held, version, [session], [response], boundaries deepest first
-- ARGV: 1 if a session is asked for, 1 if a response is asked for, head hash or '', leases to sweep at most
-- Returns seconds, microseconds, membership version, loads, beliefs, depth or -1, branch id, branch,
--   head branch id, head branch, session, binding of the response

local due = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now_ms, 'LIMIT', 0, ARGV[4])
if #due > 0 then
  local held = redis.call('HMGET', KEYS[4], unpack(due))
  for i = 1, #due do
    local lease = parse_lease(held[i])
    if lease then
      local load = read_load(lease.replica)
      if subtract(load, lease) then write_load(lease.replica, load) end
      count_turn(lease.branch, -1)
    end
  end
  redis.call('ZREM', KEYS[3], unpack(due))
  redis.call('HDEL', KEYS[4], unpack(due))
end

local at = 6
local session, binding = false, false
if ARGV[1] == '1' then
  session = read(KEYS[at])
  at = at + 1
end
if ARGV[2] == '1' then
  binding = read(KEYS[at])
  at = at + 1
end

local function live(branch_id)
  local raw = read(base .. 'n:' .. branch_id)
  return parse_branch(raw) and raw or false
end

-- The next turn's boundaries end a message or two beyond the known one: look at few first, at all in the end.
local depth, branch_id, branch = -1, false, false
local from, step = at, 8
while from <= #KEYS and depth < 0 do
  local to = math.min(from + step - 1, #KEYS)
  local ids = redis.call('MGET', unpack(KEYS, from, to))
  for i = 1, #ids do
    branch = ids[i] and live(ids[i])
    if branch then
      depth, branch_id = from + i - 1 - at, ids[i]
      break
    end
  end
  from, step = to + 1, math.min(step * 4, 1024)
end

local head_id, head_branch = false, false
if depth < 0 and ARGV[3] ~= '' then
  local known = parse_session(session)
  for _, head in ipairs(known and known.heads or {}) do
    if head.hash == ARGV[3] then
      head_branch = live(head.branch)
      head_id = head_branch and head.branch
      break
    end
  end
end

return {
  time[1], time[2], read(KEYS[5]), redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]),
  depth, branch_id, branch, head_id, head_branch, session, binding,
}
