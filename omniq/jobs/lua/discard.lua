-- Take back a job whose message could not be published. KEYS[4] = index; ARGV: job id.
if get('state') ~= 'queued' then return 0 end
redis.call('DEL', JOB, EVENTS, BLOBS)
redis.call('ZREM', KEYS[4], ARGV[1])
return 1
