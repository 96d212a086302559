-- Shared by every job script (prepended to each). KEYS[1] = job hash, KEYS[2] = its event stream,
-- KEYS[3] = its set of blob references. The last five ARGV are always: retention of dead letters in ms,
-- most dead letters kept, retention in ms, most events kept, key prefix of the namespace ("omniq:").
--
-- A job hash holds: spec, state, up (stage -> stages before it), created/started/finished, error,
-- died and dead (see `bury`), "v:<output>" and "a:<artifact>" results, "m:<output>" of those it ends
-- without (see _partial.lua), "w:<channel>" of who waits for its end, and per stage "<stage>|<field>". For chunk streams:
-- "<stage>|alive" (its lease), "<stage>|streams" (what it hands on while it runs) and
-- "<reader>|window:<stage>" (the run of <stage> whose first window is there).
-- For admission (_share.lua): "pipeline", "tenant", "inbytes" (of its input files), "held" and
-- "held_in" (its first messages while it is held back, and the list of its place), "hook" (whom to tell of its end).

local JOB, EVENTS, BLOBS = KEYS[1], KEYS[2], KEYS[3]
local DEAD_RETENTION = tonumber(ARGV[#ARGV - 4])
local MAX_DEAD = tonumber(ARGV[#ARGV - 3])
local RETENTION = tonumber(ARGV[#ARGV - 2])
local MAX_EVENTS = tonumber(ARGV[#ARGV - 1])
local PREFIX = ARGV[#ARGV]
local FINAL = {succeeded = true, failed = true, cancelled = true, expired = true}

-- A server without memory left refuses the first write that takes some, but no later one of the same
-- script. What ends work, and so frees memory in the end, is to go on: it writes nothing at first.
local function even_if_full() redis.call('HDEL', JOB, '') end
-- What takes on more work begins with a write that takes none, and is refused whole.
local function unless_full() redis.call('SETRANGE', PREFIX .. 'memory', 0, '') end

-- One time for all that a script does.
local NOW
local function now()
  if not NOW then
    local t = redis.call('TIME')
    NOW = string.format('%d.%06d', t[1], t[2])
  end
  return NOW
end

-- What has been read or written of the job hash, false where there is no such field: a command costs
-- more than all else that a script does.
local FIELDS = {}
local function fetch(...)
  local names = {}
  for _, name in ipairs({...}) do
    if FIELDS[name] == nil then names[#names + 1] = name end
  end
  if #names == 0 then return end
  for i, value in ipairs(redis.call('HMGET', JOB, unpack(names))) do FIELDS[names[i]] = value end
end
local function get(field)
  if FIELDS[field] == nil then FIELDS[field] = redis.call('HGET', JOB, field) end
  return FIELDS[field]
end
local function set(...)
  redis.call('HSET', JOB, ...)
  local pairs_ = {...}
  for i = 1, #pairs_, 2 do FIELDS[pairs_[i]] = tostring(pairs_[i + 1]) end
end
-- Many strings as one, for PUBLISH: their lengths as a JSON list, a line feed, the strings. Escaping
-- them would cost more than all else. Read by omniq/jobs/frames.py.
local function framed(strings)
  local lengths = {}
  for i, s in ipairs(strings) do lengths[i] = #s end
  return cjson.encode(lengths) .. '\n' .. table.concat(strings)
end
local function sget(stage, field) return get(stage .. '|' .. field) end
local function sset(stage, field, value) set(stage .. '|' .. field, value) end

local function event(kind, stage, data)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', MAX_EVENTS, '*',
             'type', kind, 'stage', stage or '', 'time', now(), 'data', data or '{}')
end

-- What never changes: the stages in order, and for each those before it.
local ORDER, UP
local function stages()
  if not ORDER then
    ORDER = cjson.decode(get('order'))
    local states = {}
    for i, s in ipairs(ORDER) do
      if FIELDS[s .. '|state'] == nil then states[#states + 1] = s .. '|state' end
    end
    if #states > 0 then fetch(unpack(states)) end
  end
  return ORDER
end
local function before(stage)
  UP = UP or cjson.decode(get('up'))
  return UP[stage] or {}
end

local function any_stage(state)
  for _, s in ipairs(stages()) do
    if sget(s, 'state') == state then return true end
  end
  return false
end

-- Whether (stage, fence) is the run that may still write.
local function current(stage, fence)
  return sget(stage, 'state') == 'running' and sget(stage, 'fence') == fence
end

-- What lies here at once, all chunks of it; shared-memory blobs, and those on a server of their own,
-- by their host's garbage list. What lies on HOST, that of the caller, is also noted in FREED: the
-- caller frees it at once and says so the next time.
local HOST, FREED = '', {}
local MOST_FREED = 1000  -- Lua returns no more than 8,000 values; the rest is on the list
local CHUNK_BYTES = 4194304  -- as in omniq/blobs/redis_frame.py
local function garbage(host) return PREFIX .. 'garbage:' .. host end
local function free_blob(json)
  local ref = cjson.decode(json)
  local first = PREFIX .. 'blob:' .. ref.id
  if redis.call('UNLINK', first) == 1 then
    redis.call('HDEL', PREFIX .. 'blobs', ref.id)
    for n = 1, math.ceil(ref.nbytes / CHUNK_BYTES) - 1 do
      redis.call('UNLINK', PREFIX .. 'blob:' .. n .. ':{' .. first .. '}')
    end
  end
  if type(ref.host) == 'string' then
    redis.call('SADD', garbage(ref.host), json)
    -- Nobody works off the list of a host that is gone; one that lives frees its own blobs of ended
    -- jobs without the list too.
    redis.call('PEXPIRE', garbage(ref.host), RETENTION)
    if ref.host == HOST and #FREED < MOST_FREED then FREED[#FREED + 1] = json end
  end
end

-- Free what the job held: blobs and chunk streams. All keys are in the job's slot. The request's own
-- files may be wanted again by who retries a dead letter.
local function free_blobs(but_files)
  local kept = {}
  for _, json in ipairs(redis.call('SMEMBERS', BLOBS)) do
    if but_files and string.find(cjson.decode(json).id, '^[^.]*%.input%.') then
      kept[#kept + 1] = json
    else
      free_blob(json)
    end
  end
  local streams = JOB .. ':streams'
  for _, key in ipairs(redis.call('SMEMBERS', streams)) do redis.call('UNLINK', key) end
  redis.call('DEL', BLOBS, streams)
  if #kept > 0 then redis.call('SADD', BLOBS, unpack(kept)) end
end

local function expire_with_job(key)
  local ttl = redis.call('PTTL', JOB)
  if ttl > 0 then redis.call('PEXPIRE', key, ttl) end
end

-- Chunk streams: when a lease taken now lapses, and both parts of a stream's newest id (or 0, 0).
local function lease_end(seconds) return string.format('%.3f', tonumber(now()) + seconds) end

local function newest_id(stream)
  local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  if not newest then return 0, 0 end
  local fence, position = string.match(newest[1], '^(%d+)-(%d+)$')
  return tonumber(fence), tonumber(position)
end

-- What the stages before `stage` hand to it, as a list of JSON members; nil while one is missing.
local function handed(stage)
  local found = {}
  for _, up in ipairs(before(stage)) do
    local made
    if FIELDS[up .. '|outputs'] == nil then fetch(up .. '|state', up .. '|outputs') end
    local state = sget(up, 'state')
    if state == 'succeeded' then
      made = sget(up, 'outputs') or '{}'
    elseif state == 'running' and sget(stage, 'window:' .. up) == sget(up, 'fence') then
      made = sget(up, 'streams')  -- its first window is there
    end
    if not made then return nil end
    found[#found + 1] = cjson.encode(up) .. ':' .. made
  end
  return found
end

-- What a job's end means to those who wait to be let in; in _share.lua.
local give_up_place
-- A job that fails is to be kept as a dead letter, also if it ends without the outputs of the stage
-- that failed: its record stays for longer, and it can be tried again (omniq/jobs/dead.py). Details: a
-- JSON object.
local DEAD = PREFIX .. 'dead'
local function job_id() return string.match(JOB, '{(.*)}$') end
local function bury(stage, details)
  set('died', cjson.encode({stage = stage, time = tonumber(now()), details = details}))
end
-- With its end it is one, among the newest so many.
local function keep_dead(details)
  set('dead', details)
  redis.call('ZADD', DEAD, now(), job_id())
  redis.call('ZREMRANGEBYSCORE', DEAD, '-inf', tonumber(now()) - DEAD_RETENTION / 1000)
  local over = redis.call('ZCARD', DEAD) - MAX_DEAD
  if over > 0 then
    for _, id in ipairs(redis.call('ZRANGE', DEAD, 0, over - 1)) do
      redis.call('HDEL', PREFIX .. 'job:{' .. id .. '}', 'dead')
      redis.call('PEXPIRE', PREFIX .. 'job:{' .. id .. '}', RETENTION)
      redis.call('ZREM', DEAD, id)
    end
  end
end

-- What the event of a success says of the outputs that are missing.
local function without()
  local missing = {}
  for output in pairs(cjson.decode(get('partial') or '{}')) do
    local why = get('m:' .. output)
    if why then missing[#missing + 1] = cjson.encode(output) .. ':' .. why end
  end
  if #missing == 0 then return '{}' end
  return '{"partial":true,"missing":{' .. table.concat(missing, ',') .. '}}'
end

-- A stage will not go on. A run of it stops, also one that has not begun because it waits to be by
-- itself (Isolation in workers/omniq_workers): who has them hears of it, and up to which fence.
local function give_up(stage)
  local fence = sget(stage, 'fence')
  sset(stage, 'state', 'cancelled')
  if fence then redis.call('PUBLISH', PREFIX .. 'cancel', job_id() .. ' ' .. stage .. ' ' .. fence) end
end

-- The only way into a final state.
local function finalise(state, err)
  for _, s in ipairs(stages()) do
    local st = sget(s, 'state')
    if st ~= 'succeeded' and st ~= 'failed' and st ~= 'cancelled' then give_up(s) end
  end
  set('state', state, 'finished', now())
  fetch('dead', 'died', 'partial')
  local data = state == 'succeeded' and without() or '{}'
  if err and err ~= '' then
    set('error', err)
    data = '{"error":' .. err .. '}'
  end
  event('job.' .. state, nil, data)
  if get('died') and (state == 'failed' or state == 'succeeded') then keep_dead(get('died')) end
  local dead = get('dead')
  free_blobs(dead)
  local retention = dead and math.max(RETENTION, DEAD_RETENTION) or RETENTION
  local waiters, record, kept = {}, {job_id()}, {}
  local all = redis.call('HGETALL', JOB)
  for i = 1, #all, 2 do
    local kind = string.sub(all[i], 1, 2)
    if kind == 'a:' then
      local key = cjson.decode(all[i + 1]).key
      kept[key] = true
      redis.call('PEXPIRE', key, retention)
    end
    if kind == 'w:' then
      waiters[#waiters + 1] = all[i]
    else
      record[#record + 1], record[#record + 2] = all[i], all[i + 1]
    end
  end
  -- Files of runs that were taken over, and never named.
  local files = redis.call('SMEMBERS', JOB .. ':files')
  for _, key in ipairs(files) do
    if not kept[key] then redis.call('UNLINK', key) end
  end
  if #files > 0 then redis.call('UNLINK', JOB .. ':files') end
  if #waiters > 0 then
    redis.call('HDEL', JOB, unpack(waiters))
    record = framed(record)
    for _, field in ipairs(waiters) do redis.call('PUBLISH', string.sub(field, 3), record) end
  end
  redis.call('PEXPIRE', JOB, retention)
  redis.call('PEXPIRE', EVENTS, retention)
  if dead then redis.call('PEXPIRE', BLOBS, retention) end
  give_up_place()
end

-- A run of a job that is being cancelled is over, however it ended; the job is with the last one.
local function end_cancelled(stage)
  set(stage .. '|state', 'cancelled', stage .. '|finished', now())
  if not any_stage('running') then finalise('cancelled') end
end
