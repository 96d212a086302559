-- Leave a blob to the job, to be freed with it. Returns 1, or 0 if the job has ended.
-- ARGV: blob reference JSON.
local state = get('state')
if not state or FINAL[state] then return 0 end
redis.call('SADD', BLOBS, ARGV[1])
expire_with_job(BLOBS)
return 1
