-- A webhook was delivered, or given up, or is to be tried again; 0 if it is somebody else's by now, or
-- that of a later end of the job. ARGV: job id, the end of the caller's lease, seconds until then or ''.
local due = PREFIX .. 'webhooks'
local score = redis.call('ZSCORE', due, ARGV[1])
if not score or tonumber(score) ~= tonumber(ARGV[2]) then return 0 end
if ARGV[3] == '' then
  redis.call('ZREM', due, ARGV[1])
else
  redis.call('ZADD', due, tonumber(now()) + tonumber(ARGV[3]), ARGV[1])
end
return 1
