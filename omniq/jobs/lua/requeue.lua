-- A stage's message is lost: send it again, if the stage is still as it was found. Returns 1, or 0 if
-- it is not. A run that was going on is given up, and may write nothing any more.
-- ARGV: stage, its state, fence and time of the last change as `standing` said, messages (see
-- `messages`; one). KEYS[4...] = queues.
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
  sset(stage, 'state', 'cancelled')
  if not any_stage('running') then finalise('cancelled') end
  return 1
end
set(stage .. '|state', 'queued', stage .. '|queued', now())
event('stage.requeued', stage, cjson.encode({was = st}))
for _, m in ipairs(messages(5, 4)) do send(m) end
return 1
