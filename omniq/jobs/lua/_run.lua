-- Shared as well: beginning a stage's run, and sending the messages of stages.

-- End a job whose deadline has passed, with what it has made if the client takes that.
local function end_late(err)
  local function unmade(s) return sget(s, 'state') ~= 'succeeded' end
  if not go_on_without(unmade, err) then finalise('expired', err) end
end
-- The same while nothing of it runs; `stage` would have been next, if that is known.
local function expire(stage)
  end_late(cjson.encode({code = 'deadline_exceeded',
    message = 'the job was not served before its deadline', details = stage and {stage = stage}}))
end
-- A stage has failed for good, and with it the job, but for what the client takes without it.
local function fail(stage, err)
  sset(stage, 'state', 'failed')
  sset(stage, 'error', err)
  event('stage.failed', stage, '{"error":' .. err .. '}')
  if not go_on_without(function(s) return s == stage end, err) then finalise('failed', err) end
end
-- End a job whose deadline has passed while nothing of it runs; true if this has ended it.
local function expire_unserved()
  fetch('state', 'deadline', 'order')
  local state, deadline = get('state'), get('deadline')
  if not state or FINAL[state] or not deadline or tonumber(now()) <= tonumber(deadline) then return false end
  if any_stage('running') then return false end  -- its worker sees to it
  expire()
  return true
end

-- Jobs that are held back are sent as far as there is room; in _share.lua.
local let_go

local function begin_run(stage, worker, redelivered, most)
  fetch('state', 'spec', 'up', 'deadline', 'pipeline', stage .. '|state', stage .. '|fence',
        stage .. '|deliveries', stage .. '|attempts')
  local state = get('state')
  if not state then return {'stop', 0, 0, '', '{}', ''} end
  local st = sget(stage, 'state')
  if not st then return {'stop', 0, 0, '', '{}', state} end
  local fence = tonumber(sget(stage, 'fence') or '0')

  if state == 'cancelling' and st == 'running' and redelivered == '1' then
    -- Its run died before it could say that it stopped.
    end_cancelled(stage)
    return {'stop', fence, 0, '', '{}', get('state')}
  end
  if FINAL[state] or state == 'cancelling' then return {'stop', fence, 0, '', '{}', state} end
  if st == 'succeeded' then
    return {'done', fence, 0, get('spec'), sget(stage, 'outputs') or '{}', state}
  end
  if OVER[st] then return {'stop', fence, 0, '', '{}', state} end  -- the job goes on without it
  local outputs, spec = handed(stage), get('spec')
  if not outputs then
    -- A dead run that read what a stage before streamed; that one runs anew and will send for this.
    if st == 'running' and redelivered == '1' then sset(stage, 'state', 'queued') end
    return {'wait', fence, 0, '', '{}', state}
  end
  if st == 'running' and redelivered ~= '1' then return {'duplicate', fence, 0, '', '{}', state} end

  local deadline = get('deadline')
  if deadline and tonumber(now()) > tonumber(deadline) and st ~= 'running' then
    expire(stage)
    return {'stop', fence, 0, '', '{}', get('state')}
  end
  local deliveries = tonumber(sget(stage, 'deliveries') or '0') + 1
  if deliveries > most then
    sset(stage, 'deliveries', deliveries)
    local err = cjson.encode({code = 'delivery_limit', message = 'stage ' .. stage .. ' was delivered '
      .. most .. ' times and every worker that took it went away', details = {stage = stage}})
    bury(stage, {deliveries = deliveries, worker = sget(stage, 'worker') or nil})
    fail(stage, err)
    return {'stop', fence, 0, '', '{}', get('state')}
  end

  -- Grows with time besides: a server that has come back without its newest writes hands out none that a
  -- run has already.
  local older = sget(stage, 'fence')
  fence = string.format('%.0f', math.max(fence + 1, math.floor(tonumber(now()) * 1000)))
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
  if older then redis.call('HDEL', JOB, stage .. '|step', stage .. '|total', stage .. '|error') end
  event('stage.started', stage, cjson.encode({attempt = attempt, worker = worker}))
  return {'run', fence, attempt, spec, '{' .. table.concat(outputs, ',') .. '}', 'running'}
end

-- What a worker that has the task of `stage` must do with it, for the worker's record; redelivered is
-- '0' or '1'. Returns {verdict, fence, attempt, spec, outputs JSON, state}.
-- Verdicts: run | done | wait | duplicate | stop (omniq.jobs.model.Verdict).
local function begin(stage, worker, redelivered, most)
  local grant = begin_run(stage, worker, redelivered, most)
  let_go(get('pipeline'))  -- its message has left a queue
  return grant
end

-- Messages among the arguments, from ARGV[at] on: their number, the channel of Celery's events, and
-- for each its stage, the message, its task-sent event or '', its tag, its queue's name.
-- KEYS[first...] = the lists they go to.
local function messages(at, first)
  local found = {}
  for i = 1, tonumber(ARGV[at]) do
    local a = at + 5 * i - 3
    found[i] = {list = KEYS[first + i - 1], channel = ARGV[at + 1], stage = ARGV[a],
                message = ARGV[a + 1], event = ARGV[a + 2], tag = ARGV[a + 3], queue = ARGV[a + 4]}
  end
  return found
end

-- A worker with room that listens and waits for messages of this queue, and its most deliveries of
-- one message; nil if there is none. See workers/omniq_workers/intake.py.
local CANDIDATES = 4
local function hand_channel(member) return PREFIX .. 'hand:' .. member end
local function who_waits(waiting)
  local members = redis.call('ZREVRANGE', waiting, 0, CANDIDATES - 1, 'WITHSCORES')
  for i = 1, #members, 2 do
    local member = members[i]
    if tonumber(members[i + 1]) < 1 then return nil end
    if redis.call('PUBSUB', 'NUMSUB', hand_channel(member))[2] == 0 then
      redis.call('ZREM', waiting, member)  -- its connection is gone
    else
      -- One that stands still has a connection, but has not said for a while that it hears.
      local most = redis.call('GET', PREFIX .. 'hears:' .. member)
      if most then return member, tonumber(most) end
    end
  end
end

-- Hand a message to a worker that waits for it, its run begun: as if the worker had taken it off its
-- queue, noted it as unacknowledged, and begun. False if nobody waits, or others came before.
local function hand(m)
  local waiting = PREFIX .. 'waiting:' .. m.queue
  local member, most = who_waits(waiting)
  if not member or redis.call('EXISTS', m.list) == 1 then return false end
  redis.call('ZINCRBY', waiting, -1, member)
  redis.call('ZADD', PREFIX .. 'unacked_index', now(), m.tag)
  redis.call('HSET', PREFIX .. 'unacked', m.tag,
             '[' .. m.message .. ',"",' .. cjson.encode(m.queue) .. ']')
  local grant = begin(m.stage, string.match(member, '^(.*)|'), '0', most)
  for i, value in ipairs(grant) do grant[i] = tostring(value) end
  redis.call('PUBLISH', hand_channel(member), framed({m.message, unpack(grant)}))
  return true
end

local function send(m)
  if not hand(m) then redis.call('LPUSH', m.list, m.message) end
  if m.event ~= '' then redis.call('PUBLISH', m.channel, m.event) end
end
