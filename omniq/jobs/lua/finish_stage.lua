-- A run has its outputs: write them once and send what follows; end the job with its last stage, or,
-- if it is being cancelled, with the last run that has stopped.
-- Returns {1, 1 if the caller's room for another message is known now or else 0, blob refs on the
-- caller's host that nobody needs any more...}, or {0, 0} if refused.
-- ARGV: stage, fence, outputs JSON, metrics JSON, list of blob refs (JSON strings),
-- values {name: JSON string}, artifacts {name: JSON string}, the caller's host, list of refs that it
-- has freed since the last time, tag of the run's own message if that is done with by this or else
-- '', where the caller waits for messages and its name there or else '' twice, messages to the stages
-- behind (see `messages`).
-- KEYS[4...] = queues.
local stage = ARGV[1]
HOST = ARGV[8]
if ARGV[9] ~= '[]' then redis.call('SREM', garbage(HOST), unpack(cjson.decode(ARGV[9]))) end
even_if_full()
fetch('state', 'order', 'up', 'partial', stage .. '|state', stage .. '|fence')
local state = get('state')
if not state or FINAL[state] or not current(stage, ARGV[2]) then return {0, 0} end
if state == 'cancelling' then
  -- The run has ended without having heard of it: nobody is left who could say that it has stopped.
  end_cancelled(stage)
  return {0, 0}
end
local t = now()
local record = {stage .. '|state', 'succeeded', stage .. '|outputs', ARGV[3],
                stage .. '|metrics', ARGV[4], stage .. '|finished', t}
local function add(field, value)
  record[#record + 1] = field
  record[#record + 1] = value
end
for name, json in pairs(cjson.decode(ARGV[6])) do add('v:' .. name, json) end
for name, json in pairs(cjson.decode(ARGV[7])) do add('a:' .. name, json) end
if ARGV[5] ~= '[]' then
  redis.call('SADD', BLOBS, unpack(cjson.decode(ARGV[5])))
  expire_with_job(BLOBS)
end
local rest = false
for _, s in ipairs(stages()) do
  if s ~= stage and not is_over(s) then
    rest = true
    for _, u in ipairs(before(s)) do
      -- One behind a window edge may run already.
      if u == stage and sget(s, 'state') ~= 'running' then add(s .. '|queued', t) end
    end
  end
end
set(unpack(record))
event('stage.succeeded', stage, '{"metrics":' .. ARGV[4] .. '}')
if ARGV[10] ~= '' then
  redis.call('ZREM', PREFIX .. 'unacked_index', ARGV[10])
  redis.call('HDEL', PREFIX .. 'unacked', ARGV[10])
end
local known = 0
if ARGV[11] ~= '' and redis.call('ZADD', ARGV[11], 'XX', 'INCR', 1, ARGV[12]) then known = 1 end
if not rest then
  finalise('succeeded')
else
  local made_by = {unpack(before(stage))}
  -- Those behind may have been given up meanwhile.
  if get('partial') then made_by[#made_by + 1] = stage end
  free_unread(made_by)
end
-- A join is sent once, with its last input.
for _, m in ipairs(messages(13, 4)) do
  if handed(m.stage) and not is_over(m.stage) then send(m) end
end
return {1, known, unpack(FREED)}
