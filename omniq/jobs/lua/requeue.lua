-- A stage's message is lost: send it again, or fail the stage where none can be made, if it is still as
-- it was found. Returns 1, or 0 if it is not. A run that was going on is given up, and may write nothing
-- any more; of a job that is being cancelled, that is all.
-- ARGV: stage, its state, fence and time of the last change as `standing` said, error JSON or '',
-- messages (see `messages`; one, or none). KEYS[4...] = queues.
local stage = ARGV[1]
even_if_full()
local state = get('state')
if not state or FINAL[state] or not should_have_message(stage) then return 0 end
local st = sget(stage, 'state')
if st ~= ARGV[2] or (sget(stage, 'fence') or '0') ~= ARGV[3] or last_change(stage) ~= ARGV[4] then
  return 0
end
if state == 'cancelling' then
  if st ~= 'running' then return 0 end
  end_cancelled(stage)
  return 1
end
if ARGV[5] ~= '' then
  bury(stage, {deliveries = tonumber(sget(stage, 'deliveries')), worker = sget(stage, 'worker') or nil})
  fail(stage, ARGV[5])
  return 1
end
set(stage .. '|state', 'queued', stage .. '|queued', now())
event('stage.requeued', stage, cjson.encode({was = st}))
for _, m in ipairs(messages(6, 4)) do send(m) end
return 1
