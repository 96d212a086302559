-- Let in so many bytes of a job's input files before they are written; they are given up in a minute
-- unless the job is created. Returns {} or a refusal.
-- ARGV: job id, bytes, most bytes of all that wait, pipeline, part of the broker's memory that may be
-- used, or 0 if they are not for the broker.
unless_full()
local KEPT = 60
local whose, sum = input_keys()
local t, bytes, most = tonumber(now()), tonumber(ARGV[2]), tonumber(ARGV[3])
for _, member in ipairs(redis.call('ZRANGE', whose, '-inf', t, 'BYSCORE')) do forget_input(member) end
local present = tonumber(redis.call('GET', sum) or '0')
if present + bytes > most then
  local jobs = math.max(1, redis.call('ZCARD', whose))
  local places = math.ceil((present + bytes - most) / math.max(1, present / jobs))
  return refused('system', 'input_bytes', most, present, wait_for_room(ends_of(ARGV[4]), places, jobs))
end
if ARGV[5] ~= '0' then
  local full = no_memory(tonumber(ARGV[5]), bytes)
  if full then return full end
end
redis.call('ZADD', whose, t + KEPT, ARGV[1] .. WINDOW .. ARGV[2])
redis.call('INCRBY', sum, bytes)
return {}
