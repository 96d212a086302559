-- Accept a job: record (state queued), index, first event, and the messages that start it. Returns 1,
-- or 0 if the id exists. KEYS[4] = index of all jobs, KEYS[5] = unfinished jobs of its pipeline,
-- KEYS[6...] = queues. ARGV: spec JSON, stages
-- JSON, upstream JSON, id, created, ttl ms, deadline or '', channel of who waits for its end or '',
-- list of refs (JSON strings) of the blobs among its inputs, messages (see `messages`).
if redis.call('EXISTS', JOB) == 1 then return 0 end
local ttl = tonumber(ARGV[6])
local record = {'spec', ARGV[1], 'order', ARGV[2], 'up', ARGV[3], 'state', 'queued', 'created', ARGV[5],
                'open', KEYS[5]}
local function add(field, value)
  record[#record + 1] = field
  record[#record + 1] = value
end
if ARGV[7] ~= '' then add('deadline', ARGV[7]) end
if ARGV[8] ~= '' then add('w:' .. ARGV[8], '') end
for _, s in ipairs(cjson.decode(ARGV[2])) do add(s .. '|state', 'queued') end
set(unpack(record))
event('job.queued')
redis.call('PEXPIRE', JOB, ttl)
redis.call('PEXPIRE', EVENTS, ttl)
local blobs = cjson.decode(ARGV[9])
if #blobs > 0 then
  redis.call('SADD', BLOBS, unpack(blobs))
  redis.call('PEXPIRE', BLOBS, ttl)
end
redis.call('ZADD', KEYS[4], ARGV[5], ARGV[4])
redis.call('ZADD', KEYS[5], now(), ARGV[4])
-- Records older than any that can still exist leave the index.
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', '(' .. (tonumber(ARGV[5]) - (ttl + RETENTION) / 1000))
for _, m in ipairs(messages(10, 6)) do send(m) end
return 1
