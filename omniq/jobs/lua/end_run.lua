-- A run ends without outputs. Returns 1, or 0 if refused.
-- ARGV: stage, fence, how (retry | release | fail | expire | stop), error JSON or '', delay seconds, job
-- id, traceback of a failure that makes it a dead letter or ''.
-- KEYS[4] = cancel channel.
local stage, how, err = ARGV[1], ARGV[3], ARGV[4]
even_if_full()
local state = get('state')
if not state or FINAL[state] or not current(stage, ARGV[2]) then return 0 end
sset(stage, 'finished', now())
if err ~= '' then sset(stage, 'error', err) end

if state == 'cancelling' or how == 'stop' then
  end_cancelled(stage)
  if get('state') == 'running' then
    -- The job cannot succeed any more: those that feed this stage, and what runs beside it, stop.
    set('state', 'cancelling')
    event('job.cancelling')
    redis.call('PUBLISH', KEYS[4], ARGV[6])
  end
  return 1
end
if how == 'release' then
  sset(stage, 'state', 'queued')
  redis.call('HINCRBY', JOB, stage .. '|attempts', -1)
  redis.call('HINCRBY', JOB, stage .. '|deliveries', -1)
elseif how == 'retry' then
  sset(stage, 'state', 'retrying')
  redis.call('HINCRBY', JOB, stage .. '|deliveries', -1)
  event('stage.retrying', stage, '{"delay":' .. ARGV[5] .. ',"error":' .. err .. '}')
elseif how == 'expire' then
  sset(stage, 'state', 'failed')
  event('stage.failed', stage, '{"error":' .. err .. '}')
  end_late(err)
else
  if ARGV[7] ~= '' then
    bury(stage, {traceback = ARGV[7], deliveries = tonumber(sget(stage, 'deliveries')),
                 worker = sget(stage, 'worker')})
  end
  fail(stage, err)
end
return 1
