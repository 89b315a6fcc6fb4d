-- What all scripts share: the clock, the records (formats: router/store/codec.py) and giving leases back.
-- KEYS[1] is <base>load but for the permits' scripts, which derive no keys; those derived from `base` share its hash tag.

local base = string.sub(KEYS[1], 1, -5)
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local now_ms = math.floor(now * 1000)

-- A string, or false where the key is absent or holds another type: a foreign record counts as absent.
local function read(key)
  return redis.call('MGET', key)[1]
end

local function integer(number)
  return string.format('%.0f', number)
end

local function sane(number)
  return number >= 0 and number < math.huge
end

-- A counter; whatever is no whole number of zero or more counts as zero.
local function read_number(key)
  local number = tonumber(read(key) or 0)
  return number and sane(number) and math.floor(number) or 0
end

local function pack_text(text)
  return struct.pack('Bc0', #text, text)
end

local function parse_load(raw)
  if not raw or #raw < 57 or string.byte(raw) ~= 1 then return nil end
  local _, in_flight, prefill, locked, admitted, crowd, live, crowd_at, life = struct.unpack('<BI4i8i8i8dddI4', raw)
  if not (sane(crowd) and sane(live) and sane(crowd_at)) or prefill < 0 or locked < 0 or admitted < 0 then
    return nil
  end
  return {
    in_flight = in_flight, prefill = prefill, locked = locked, admitted = admitted,
    crowd = crowd, live = live, crowd_at = crowd_at, life = life, incarnation = string.sub(raw, 58),
  }
end

local function read_load(replica)
  return parse_load(redis.call('HGET', KEYS[1], replica))
end

-- A load entry of a life that begins now, at zero.
local function begin_life(lives_key, incarnation)
  local lives = read_number(lives_key) + 1
  redis.call('SET', lives_key, integer(lives))
  return {in_flight = 0, prefill = 0, locked = 0, admitted = 0, crowd = 0, live = 0, crowd_at = now,
          life = lives % 4294967296, incarnation = incarnation}
end

local function write_load(replica, load)
  redis.call('HSET', KEYS[1], replica, struct.pack('<BI4i8i8i8dddI4',
    1, load.in_flight, load.prefill, load.locked, load.admitted, load.crowd, load.live, load.crowd_at, load.life)
    .. load.incarnation)
end

local function parse_lease(raw)
  if not raw or #raw < 23 or string.byte(raw) ~= 1 then return nil end
  local ok, _, life, prefill, locked, replica, branch, past = pcall(struct.unpack, '<BI4i8i8Bc0Bc0', raw)
  if not ok or past ~= #raw + 1 or prefill < 0 or locked < 0 then return nil end
  return {life = life, prefill = prefill, locked = locked, replica = replica, branch = branch}
end

local function pack_lease(lease)
  return struct.pack('<BI4i8i8', 1, lease.life, lease.prefill, lease.locked)
    .. pack_text(lease.replica) .. pack_text(lease.branch)
end

local function scan_branch(raw)
  local b = {}
  local _, count, at
  _, b.version, b.turns, b.in_flight, b.tokens, b.text_bytes, b.live, b.inherited, b.weight, b.active_at,
    b.session, b.home, b.home_incarnation, count, at = struct.unpack('<BI4I4I4I4I4I4I4ddBc0Bc0Bc0B', raw)
  b.tips = string.sub(raw, at, at + 20 * count - 1)
  if #b.tips ~= 20 * count or not (sane(b.weight) and sane(b.active_at)) then return nil end
  count, at = struct.unpack('B', raw, at + 20 * count)
  b.residues = {}
  for i = 1, count do
    local residue = {at = at}
    residue.replica, residue.incarnation, residue.tokens, residue.mark, at = struct.unpack('<Bc0Bc0I4i8', raw, at)
    b.residues[i] = residue
  end
  return at == #raw + 1 and b or nil
end

local function parse_branch(raw)
  if not raw or string.byte(raw) ~= 1 then return nil end
  local ok, branch = pcall(scan_branch, raw)
  return ok and branch or nil
end

local function pack_branch(b)
  local parts = {
    struct.pack('<BI4I4I4I4I4I4I4dd', 1, b.version, b.turns, b.in_flight, b.tokens, b.text_bytes, b.live, b.inherited,
      b.weight, b.active_at),
    pack_text(b.session), pack_text(b.home), pack_text(b.home_incarnation),
    struct.pack('B', #b.tips / 20), b.tips, struct.pack('B', #b.residues),
  }
  for _, r in ipairs(b.residues) do
    parts[#parts + 1] = pack_text(r.replica) .. pack_text(r.incarnation) .. struct.pack('<I4i8', r.tokens, r.mark)
  end
  return table.concat(parts)
end

local function parse_session(raw)
  if not raw or string.byte(raw) ~= 1 then return nil end
  local ok, _, home, incarnation, count, at = pcall(struct.unpack, '<BBc0Bc0B', raw)
  if not ok then return nil end
  local session = {home = home, incarnation = incarnation, heads = {}}
  for i = 1, count do
    local fine, hash, branch, past = pcall(struct.unpack, '<c16Bc0', raw, at)
    if not fine then return nil end
    session.heads[i] = {hash = hash, branch = branch}
    at = past
  end
  return at == #raw + 1 and session or nil
end

-- Takes from a load entry what a lease added, if the entry is still of the life that the lease was taken in.
local function subtract(load, lease)
  if not load or load.life ~= lease.life then return false end
  load.in_flight = math.max(0, load.in_flight - 1)
  load.prefill = math.max(0, load.prefill - lease.prefill)
  load.locked = math.max(0, load.locked - lease.locked)
  return true
end

-- The tokens of a recorded lease no longer wait to be prefilled.
local function progress(held_key, lease_id, lease)
  if lease.prefill == 0 then return end
  local load = read_load(lease.replica)
  if load and load.life == lease.life then
    load.prefill = math.max(0, load.prefill - lease.prefill)
    write_load(lease.replica, load)
  end
  lease.prefill = 0
  redis.call('HSET', held_key, lease_id, pack_lease(lease))
end

-- One turn of the branch more, or less; its TTL stays. False where there is no such branch.
local function count_turn(branch_id, change)
  local key = base .. 'n:' .. branch_id
  local branch = parse_branch(read(key))
  if not branch then return false end
  local in_flight = math.max(0, branch.in_flight + change)
  if in_flight ~= branch.in_flight then
    branch.in_flight = in_flight
    redis.call('SET', key, pack_branch(branch), 'KEEPTTL')
  end
  return true
end

