-- A run of a producing stage starts its chunk streams anew. Returns 1, or 0 if it is not wanted.
-- ARGV: stage, fence, lease in seconds, what it hands on while it runs (outputs JSON), stages that
-- read it (JSON list). KEYS[4] = set of all stream keys of the job; KEYS[5...] = keys of the streams
-- and of their readers' positions.
local stage = ARGV[1]
if get('state') ~= 'running' or not current(stage, ARGV[2]) then return 0 end
for i = 5, #KEYS do
  for _, entry in ipairs(redis.call('XRANGE', KEYS[i], '-', '+')) do
    local fields = entry[2]
    for f = 1, #fields, 2 do
      if fields[f] == 'blob' and fields[f + 1] ~= '' then
        free_blob(fields[f + 1])
        redis.call('SREM', BLOBS, fields[f + 1])
      end
    end
  end
  redis.call('UNLINK', KEYS[i])
  redis.call('SADD', KEYS[4], KEYS[i])
end
expire_with_job(KEYS[4])
-- Whoever still reads what an earlier run wrote must start anew with this one, which will send for
-- it: its run is no attempt, and what it writes is refused from now on.
for _, reader in ipairs(cjson.decode(ARGV[5])) do
  if sget(reader, 'state') == 'running' then
    sset(reader, 'state', 'queued')
    redis.call('HINCRBY', JOB, reader .. '|attempts', -1)
    redis.call('HINCRBY', JOB, reader .. '|deliveries', -1)
  end
end
set(stage .. '|streams', ARGV[4], stage .. '|alive', lease_end(ARGV[3]))
return 1
