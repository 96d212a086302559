-- A worker received a stage task. Returns {verdict, fence, attempt, spec, outputs JSON, state}.
-- ARGV: stage, worker, redelivered (0/1), most deliveries.
-- Verdicts: run | done | wait | duplicate | stop (omniq.jobs.model.Verdict).
local stage, worker, redelivered, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
fetch('state', 'spec', 'up', 'deadline', stage .. '|state', stage .. '|fence',
      stage .. '|deliveries', stage .. '|attempts')
local state = get('state')
if not state then return {'stop', 0, 0, '', '{}', ''} end
local st = sget(stage, 'state')
if not st then return {'stop', 0, 0, '', '{}', state} end
local fence = tonumber(sget(stage, 'fence') or '0')

if state == 'cancelling' and st == 'running' and redelivered == '1' then
  -- Its run died before it could say that it stopped.
  sset(stage, 'state', 'cancelled')
  if not any_stage('running') then finalise('cancelled') end
  return {'stop', fence, 0, '', '{}', get('state')}
end
if FINAL[state] or state == 'cancelling' then return {'stop', fence, 0, '', '{}', state} end
if st == 'succeeded' then
  return {'done', fence, 0, get('spec'), sget(stage, 'outputs') or '{}', state}
end
local outputs, spec = handed(stage), get('spec')
if not outputs then
  -- A dead run that read what a stage before streamed; that one runs anew and will send for this.
  if st == 'running' and redelivered == '1' then sset(stage, 'state', 'queued') end
  return {'wait', fence, 0, '', '{}', state}
end
if st == 'running' and redelivered ~= '1' then return {'duplicate', fence, 0, '', '{}', state} end

local deadline = get('deadline')
if deadline and tonumber(now()) > tonumber(deadline) and st ~= 'running' then
  finalise('expired', cjson.encode({code = 'deadline_exceeded',
    message = 'the job was not served before its deadline', details = {stage = stage}}))
  return {'stop', fence, 0, '', '{}', 'expired'}
end
local deliveries = tonumber(sget(stage, 'deliveries') or '0') + 1
if deliveries > most then
  sset(stage, 'deliveries', deliveries)
  local err = cjson.encode({code = 'delivery_limit', message = 'stage ' .. stage .. ' was delivered '
    .. most .. ' times and every worker that took it went away', details = {stage = stage}})
  sset(stage, 'state', 'failed')
  sset(stage, 'error', err)
  event('stage.failed', stage, '{"error":' .. err .. '}')
  finalise('failed', err)
  return {'stop', fence, 0, '', '{}', 'failed'}
end

fence = fence + 1
local attempt = tonumber(sget(stage, 'attempts') or '0') + 1
local t = now()
local record = {stage .. '|state', 'running', stage .. '|fence', fence, stage .. '|worker', worker,
                stage .. '|started', t, stage .. '|deliveries', deliveries,
                stage .. '|attempts', attempt}
if state == 'queued' then
  for _, field in ipairs({'state', 'running', 'started', t}) do record[#record + 1] = field end
  event('job.started')
end
set(unpack(record))
if fence > 1 then redis.call('HDEL', JOB, stage .. '|step', stage .. '|total', stage .. '|error') end
event('stage.started', stage, cjson.encode({attempt = attempt, worker = worker}))
return {'run', fence, attempt, spec, '{' .. table.concat(outputs, ',') .. '}', 'running'}
