-- A reader that got nothing for a while asks whether its producer lives. Returns:
-- 'ok'       it does, or has finished;
-- 'unwanted' the reader's own run is not wanted any more;
-- 'lost'     it does not: the reader's run is released with this, as no attempt. The producer has not
--            finished, so it will run again, or go on, and then send for the reader.
-- ARGV: reader, its fence, producer, the producer's fence.
local reader, stage = ARGV[1], ARGV[3]
if get('state') ~= 'running' or not current(reader, ARGV[2]) then return 'unwanted' end
if sget(stage, 'state') == 'succeeded' then return 'ok' end
if current(stage, ARGV[4]) and tonumber(sget(stage, 'alive') or '0') > tonumber(now()) then
  return 'ok'
end
sset(reader, 'state', 'queued')
redis.call('HINCRBY', JOB, reader .. '|attempts', -1)
redis.call('HINCRBY', JOB, reader .. '|deliveries', -1)
redis.call('HDEL', JOB, reader .. '|window:' .. stage)  -- should the producer live after all
return 'lost'
