-- Accept a job: record (state queued), index, first event. Returns 1, or 0 if the id exists.
-- KEYS[4] = index of all jobs. ARGV: spec JSON, stages JSON, upstream JSON, id, created, ttl ms,
-- deadline or ''.
if redis.call('EXISTS', JOB) == 1 then return 0 end
local ttl = tonumber(ARGV[6])
set('spec', ARGV[1], 'order', ARGV[2], 'up', ARGV[3], 'state', 'queued', 'created', ARGV[5])
if ARGV[7] ~= '' then set('deadline', ARGV[7]) end
for _, s in ipairs(cjson.decode(ARGV[2])) do sset(s, 'state', 'queued') end
event('job.queued')
redis.call('PEXPIRE', JOB, ttl)
redis.call('PEXPIRE', EVENTS, ttl)
redis.call('ZADD', KEYS[4], ARGV[5], ARGV[4])
-- Records older than any that can still exist leave the index.
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', '(' .. (tonumber(ARGV[5]) - (ttl + RETENTION) / 1000))
return 1
