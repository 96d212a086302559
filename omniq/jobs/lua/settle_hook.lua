-- A webhook was delivered, or given up, or is to be tried again. ARGV: job id, seconds until then or ''.
local due = PREFIX .. 'webhooks'
if ARGV[2] == '' then
  redis.call('ZREM', due, ARGV[1])
else
  redis.call('ZADD', due, 'XX', tonumber(now()) + tonumber(ARGV[2]), ARGV[1])
end
return 1
