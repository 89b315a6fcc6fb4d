-- KEYS: load, leases, held, lives
-- ARGV: lease TTL in ms, then of each lease: id, replica, incarnation, branch id, packed waiting and locked tokens
-- Returns the leases that were gone and are taken again. One whose time is up but whose counts nobody has given back
-- yet is saved; one whose replica lives another life by now stays gone.

local expires = now_ms + tonumber(ARGV[1])
local taken = {}

local function take(id, replica, incarnation, branch_id, prefill, locked)
  local load = read_load(replica) or begin_life(KEYS[4], incarnation)
  if load.incarnation ~= incarnation then return end
  load.in_flight = load.in_flight + 1
  load.prefill = load.prefill + prefill
  load.locked = load.locked + locked
  write_load(replica, load)
  -- Nobody's where the branch is not known: one that is written later has not counted this turn, and must not lose it.
  if not count_turn(branch_id, 1) then branch_id = '' end
  redis.call('HSET', KEYS[3], id, pack_lease({
    life = load.life, prefill = prefill, locked = locked, replica = replica, branch = branch_id}))
  taken[#taken + 1] = id
end

for i = 2, #ARGV, 5 do
  local id = ARGV[i]
  local prefill, locked = struct.unpack('<i8i8', ARGV[i + 4])
  local lease = parse_lease(redis.call('HGET', KEYS[3], id))
  if not lease then
    redis.call('ZSCORE', KEYS[2], id)
    take(id, ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], prefill, locked)
    lease = taken[#taken] == id
  elseif prefill == 0 then
    progress(KEYS[3], id, lease)
  end
  if lease then redis.call('ZADD', KEYS[2], 'GT', expires, id) end
end
return taken
