-- KEYS: load, leases, held, lives, branch, session, then the boundaries of the branch's tips in their order
-- ARGV: lease, replica, incarnation, branch id, session id, tip hash or '', tips, head hash or '',
--   home replica, home incarnation, session's replica or '', session's incarnation, packed numbers, heads kept
-- Returns {version, admitted tokens}, or why the claim is stale. Reads everything before it writes anything.

local lease_id, replica, incarnation, branch_id, session_id = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local tip, tips, head, home, home_incarnation = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local version, prefill, locked, observed, slack, text_bytes, weight, half_life, branch_ttl, lease_ttl, live, inherited,
  named, live_half_life = struct.unpack('<i8i8i8i8i8I4ddi8i8I4I4Bd', ARGV[13])

local function known(branch)
  return parse_branch(read(base .. 'n:' .. branch)) ~= nil
end

if parse_lease(redis.call('HGET', KEYS[3], lease_id)) then return 'branch' end
redis.call('ZSCORE', KEYS[2], lease_id)

local branch = parse_branch(read(KEYS[5]))
if version < 0 then
  local owner = tip ~= '' and read(base .. 'b:' .. tip)
  if owner and known(owner) then return 'tip' end
  if branch then return 'branch' end
elseif not branch or branch.version ~= version then
  return 'branch'
end

local load = read_load(replica)
if load and load.incarnation ~= incarnation then load = nil end
if observed >= 0 and load and load.in_flight > observed + slack then return 'load' end

local owners = #KEYS > 6 and redis.call('MGET', unpack(KEYS, 7)) or {}
local session = parse_session(read(KEYS[6]))

-- The load: a new life begins at zero.
load = load or begin_life(KEYS[4], incarnation)
load.in_flight = load.in_flight + 1
load.prefill = load.prefill + prefill
load.locked = load.locked + locked
redis.call('ZADD', KEYS[2], now_ms + lease_ttl, lease_id)
redis.call('HSET', KEYS[3], lease_id, pack_lease({
  life = load.life, prefill = prefill, locked = locked, replica = replica, branch = branch_id}))

-- Crowd and live tokens: the branch's shares leave its old home and join its new one, where these lives still are.
local loads = {[replica] = load}
local function decayed(value, since, half)
  return value * 2 ^ (-math.max(0, now - since) / half)
end
local function join(where, life, share, tokens)
  local entry = loads[where] or read_load(where)
  if not entry or entry.incarnation ~= life then return end
  entry.crowd = math.max(0, decayed(entry.crowd, entry.crowd_at, half_life) + share)
  entry.live = math.max(0, decayed(entry.live, entry.crowd_at, live_half_life) + tokens)
  entry.crowd_at = now
  loads[where] = entry
end
if branch then
  join(branch.home, branch.home_incarnation, -decayed(branch.weight, branch.active_at, half_life),
    -decayed(branch.live, branch.active_at, live_half_life))
end
join(home, home_incarnation, weight, live)
for where, entry in pairs(loads) do write_load(where, entry) end

-- The boundaries: those kept live on, the new tip is taken over, those given up are deleted; another branch's stay.
local kept = {}
for i = 7, #KEYS do
  local hash = string.sub(KEYS[i], -16)
  local owner = owners[i - 6]
  kept[hash] = true
  if not owner or owner == branch_id or hash == tip or not known(owner) then
    redis.call('SET', KEYS[i], branch_id, 'PX', branch_ttl)
  end
end
if branch then
  local dropped = {}
  for at = 1, #branch.tips, 20 do
    local hash = string.sub(branch.tips, at, at + 15)
    if not kept[hash] then dropped[#dropped + 1] = base .. 'b:' .. hash end
  end
  owners = #dropped > 0 and redis.call('MGET', unpack(dropped)) or {}
  for i = 1, #dropped do
    if owners[i] == branch_id then redis.call('DEL', dropped[i]) end
  end
end

branch = branch or {version = 0, turns = 0, in_flight = 0, tokens = 0, session = session_id, residues = {}}
branch.version = branch.version + 1
branch.turns = branch.turns + 1
branch.in_flight = branch.in_flight + 1
branch.text_bytes, branch.weight, branch.active_at = text_bytes, weight, now
branch.live, branch.inherited = live, inherited
branch.home, branch.home_incarnation, branch.tips = home, home_incarnation, tips
redis.call('SET', KEYS[5], pack_branch(branch), 'PX', branch_ttl)

-- The session: remembered where there is something to remember.
if session or head ~= '' or ARGV[11] ~= '' or named == 1 then
  session = session or {home = '', incarnation = '', heads = {}}
  if ARGV[11] ~= '' then session.home, session.incarnation = ARGV[11], ARGV[12] end
  local heads = head ~= '' and {head .. pack_text(branch_id)} or {}
  for _, other in ipairs(session.heads) do
    if other.hash ~= head and #heads < tonumber(ARGV[14]) then
      heads[#heads + 1] = other.hash .. pack_text(other.branch)
    end
  end
  redis.call('SET', KEYS[6], struct.pack('B', 1) .. pack_text(session.home) .. pack_text(session.incarnation)
    .. struct.pack('B', #heads) .. table.concat(heads), 'PX', branch_ttl)
end

return {branch.version, integer(load.admitted)}
