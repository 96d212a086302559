-- A dead letter will not be tried again. Returns 1, or 0 if it is none (any more).
if not get('dead') then return 0 end
redis.call('ZREM', DEAD, job_id())
redis.call('HDEL', JOB, 'dead', 'died')
free_blobs()
for _, field in ipairs(redis.call('HKEYS', JOB)) do
  if string.sub(field, 1, 2) == 'a:' then
    redis.call('PEXPIRE', cjson.decode(get(field)).key, RETENTION)
  end
end
for _, key in ipairs({JOB, EVENTS}) do redis.call('PEXPIRE', key, RETENTION) end
return 1
