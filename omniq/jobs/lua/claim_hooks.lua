-- Take webhooks that are due; they are due again after the lease. Returns {job, hook JSON, number of
-- this try, receiver, end of the lease...}. Those of jobs that are no longer kept are forgotten.
-- ARGV: most, lease seconds, most that one receiver may have at once, how many each has with the
-- caller (JSON object). A receiver is a tenant, or else a host: one that does not answer holds up only
-- what is for itself, which stands aside for a moment so that others' are found behind it.
local LOOKED_AT, ASIDE = 500, 1
local due, taken = PREFIX .. 'webhooks', {}
local lease = lease_end(ARGV[2])
local most, each, has = tonumber(ARGV[1]), tonumber(ARGV[3]), cjson.decode(ARGV[4])
for _, id in ipairs(redis.call('ZRANGE', due, '-inf', now(), 'BYSCORE', 'LIMIT', 0, LOOKED_AT)) do
  if #taken >= 5 * most then break end
  local job = PREFIX .. 'job:{' .. id .. '}'
  local hook, tenant = unpack(redis.call('HMGET', job, 'hook', 'tenant'))
  if hook then
    local receiver = tenant or string.match(hook, '"url":"%a+://([^/?#"]*)') or ''
    has[receiver] = (has[receiver] or 0) + 1
    if has[receiver] <= each then
      redis.call('ZADD', due, lease, id)
      taken[#taken + 1], taken[#taken + 2] = id, hook
      taken[#taken + 1] = tostring(redis.call('HINCRBY', job, 'hook|tries', 1))
      taken[#taken + 1], taken[#taken + 2] = receiver, lease
    else
      redis.call('ZADD', due, tonumber(now()) + ASIDE, id)
    end
  else
    redis.call('ZREM', due, id)
  end
end
return taken
