-- Somebody waits for the job's end, which is now if its deadline has passed unserved. Returns its
-- fields and values if it has ended, 0 if there is no such job; else its deadline or '', and whoever
-- listens to the channel will be sent the record. ARGV: channel or ''.
even_if_full()
expire_unserved()
local state = get('state')
if not state then return 0 end
if FINAL[state] then return redis.call('HGETALL', JOB) end
if ARGV[1] ~= '' and not get('w:' .. ARGV[1]) then set('w:' .. ARGV[1], '') end
return get('deadline') or ''
