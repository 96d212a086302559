-- Try a dead letter again. Returns 1, or 0 if it is none (any more).
-- ARGV: stages to run (JSON list), spec JSON, ttl ms, messages (see `messages`). KEYS[4...] = queues.
if not get('dead') then return 0 end
unless_full()
redis.call('ZREM', DEAD, job_id())
local old = {'dead', 'died', 'error', 'deadline', 'started', 'finished'}
local partial, made = cjson.decode(get('partial') or '{}'), {}
for output in pairs(partial) do
  if get('state') == 'succeeded' and not get('m:' .. output) then made[output] = true end
  old[#old + 1] = 'm:' .. output
end
if next(made) then set('made', cjson.encode(made)) end
redis.call('HDEL', JOB, unpack(old))
for _, field in ipairs(old) do FIELDS[field] = false end
-- What it has made stays until it is made anew, and is freed then.
for _, field in ipairs(redis.call('HKEYS', JOB)) do
  if string.sub(field, 1, 2) == 'a:' then
    local key = cjson.decode(get(field)).key
    redis.call('SADD', JOB .. ':files', key)
    redis.call('PEXPIRE', key, ARGV[3])
  end
end
redis.call('PEXPIRE', JOB .. ':files', ARGV[3])
for _, s in ipairs(cjson.decode(ARGV[1])) do
  -- The fence and the number of attempts go on growing.
  for _, field in ipairs({'outputs', 'metrics', 'started', 'finished', 'error', 'step', 'total', 'worker',
                          'streams', 'alive', 'deliveries'}) do
    redis.call('HDEL', JOB, s .. '|' .. field)
    FIELDS[s .. '|' .. field] = false
  end
  for _, reader in ipairs(stages()) do redis.call('HDEL', JOB, reader .. '|window:' .. s) end
  set(s .. '|state', 'queued', s .. '|queued', now())
end
set('spec', ARGV[2], 'state', 'queued')
take_place(tonumber(ARGV[3]))
for _, key in ipairs({JOB, EVENTS, BLOBS}) do redis.call('PEXPIRE', key, ARGV[3]) end
-- Who reads the events anew must not take the old end for the end.
for _, entry in ipairs(redis.call('XREVRANGE', EVENTS, '+', '-', 'COUNT', 1)) do
  if entry[2][2] == 'job.failed' or entry[2][2] == 'job.succeeded' then redis.call('XDEL', EVENTS, entry[1]) end
end
event('job.requeued')
for _, m in ipairs(messages(4, 4)) do send(m) end
return 1
