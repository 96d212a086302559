-- Take webhooks that are due; they are due again after the lease. Returns {job, hook JSON, number of
-- this try...}. Those of jobs that are no longer kept are forgotten.
-- ARGV: most, lease seconds.
local due, taken = PREFIX .. 'webhooks', {}
for _, id in ipairs(redis.call('ZRANGE', due, '-inf', now(), 'BYSCORE', 'LIMIT', 0, ARGV[1])) do
  local job = PREFIX .. 'job:{' .. id .. '}'
  local hook = redis.call('HGET', job, 'hook')
  if hook then
    redis.call('ZADD', due, tonumber(now()) + tonumber(ARGV[2]), id)
    taken[#taken + 1], taken[#taken + 2] = id, hook
    taken[#taken + 1] = tostring(redis.call('HINCRBY', job, 'hook|tries', 1))
  else
    redis.call('ZREM', due, id)
  end
end
return taken
