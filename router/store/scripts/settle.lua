-- KEYS: load, beliefs, leases, held, branch, [response]
-- ARGV: lease, replica, incarnation, branch id, packed numbers, beliefs or '', binding of the response, residues kept

local lease_id, replica, incarnation, branch_id = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local tokens, prompt_tokens, admitted, branch_ttl = struct.unpack('<I4I4i8i8', ARGV[5])

local lease = parse_lease(redis.call('HGET', KEYS[4], lease_id))
redis.call('ZSCORE', KEYS[3], lease_id)
redis.call('HEXISTS', KEYS[2], replica)
local load = read_load(replica)
local current = load and load.incarnation == incarnation
local branch = parse_branch(read(KEYS[5]))

if lease then
  local counted = subtract(lease.replica == replica and load or nil, lease)
  if current then load.admitted = load.admitted + admitted end
  if counted or current then write_load(replica, load) end
  if lease.replica ~= replica then
    local served = read_load(lease.replica)
    if subtract(served, lease) then write_load(lease.replica, served) end
  end
  if branch and lease.branch == branch_id then
    branch.in_flight = math.max(0, branch.in_flight - 1)
  else
    count_turn(lease.branch, -1)
  end
end
redis.call('ZREM', KEYS[3], lease_id)
redis.call('HDEL', KEYS[4], lease_id)

if branch then
  if prompt_tokens > 0 then branch.tokens = prompt_tokens end
  if current and tokens > 0 then
    local residues = {{replica = replica, incarnation = incarnation, tokens = tokens, mark = load.admitted}}
    for _, residue in ipairs(branch.residues) do
      if residue.replica ~= replica and #residues < tonumber(ARGV[8]) then residues[#residues + 1] = residue end
    end
    branch.residues = residues
  end
  redis.call('SET', KEYS[5], pack_branch(branch), 'PX', branch_ttl)
end
if current and ARGV[6] ~= '' then redis.call('HSET', KEYS[2], replica, ARGV[6]) end
if KEYS[6] then redis.call('SET', KEYS[6], ARGV[7], 'PX', branch_ttl) end
return 1
