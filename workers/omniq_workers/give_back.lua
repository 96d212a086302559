-- Put a message back into queues, if it is still noted as held. Returns 1, or 0 if it is not.
-- KEYS: unacknowledged messages (hash), their tags by time, the queues' lists. ARGV: tag, the
-- message with a new tag, RPUSH (it is next) or LPUSH (it is last), seconds of a lease that has to
-- have lapsed or ''.
local tag = ARGV[1]
if ARGV[4] ~= '' then
  local score = redis.call('ZSCORE', KEYS[2], tag)
  local t = redis.call('TIME')
  local now = tonumber(t[1]) + tonumber(t[2]) / 1000000
  if score and tonumber(score) > now - tonumber(ARGV[4]) then return 0 end  -- renewed meanwhile
end
-- These two free memory: the server then allows the rest even where it is full.
redis.call('ZREM', KEYS[2], tag)
if redis.call('HDEL', KEYS[1], tag) == 0 then return 0 end
for i = 3, #KEYS do redis.call(ARGV[3], KEYS[i], ARGV[2]) end
return 1
