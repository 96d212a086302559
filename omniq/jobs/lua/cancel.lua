-- Ask a job to stop. Returns its state afterwards, or '' if unknown. KEYS[4] = cancel channel.
-- ARGV: job id. Queued (or between stages): cancelled at once; running: cancelling, announced.
even_if_full()
local state = get('state')
if not state then return '' end
if FINAL[state] then return state end
if not any_stage('running') then
  finalise('cancelled')
  return 'cancelled'
end
if state ~= 'cancelling' then
  set('state', 'cancelling')
  event('job.cancelling')
end
redis.call('PUBLISH', KEYS[4], ARGV[1])
return 'cancelling'
