-- Shared by every job script (prepended to each). KEYS[1] = job hash, KEYS[2] = its event stream,
-- KEYS[3] = its set of blob references. The last three ARGV are always: retention in ms, most
-- events kept, key prefix of the namespace ("omniq:").
--
-- A job hash holds: spec, state, up (stage -> stages before it), created/started/finished, error,
-- "v:<output>" and "a:<artifact>" results, and per stage "<stage>|<field>".

local JOB, EVENTS, BLOBS = KEYS[1], KEYS[2], KEYS[3]
local RETENTION = tonumber(ARGV[#ARGV - 2])
local MAX_EVENTS = tonumber(ARGV[#ARGV - 1])
local PREFIX = ARGV[#ARGV]
local FINAL = {succeeded = true, failed = true, cancelled = true, expired = true}

local function now()
  local t = redis.call('TIME')
  return string.format('%d.%06d', t[1], t[2])
end

local function get(field) return redis.call('HGET', JOB, field) end
local function set(...) redis.call('HSET', JOB, ...) end
local function sget(stage, field) return redis.call('HGET', JOB, stage .. '|' .. field) end
local function sset(stage, field, value) redis.call('HSET', JOB, stage .. '|' .. field, value) end

local function event(kind, stage, data)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', MAX_EVENTS, '*',
             'type', kind, 'stage', stage or '', 'time', now(), 'data', data or '{}')
end

local function stages() return cjson.decode(get('order')) end

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

-- Free what the job held: Redis blobs at once, shared-memory blobs by their host's garbage list.
local function free_blobs()
  for _, json in ipairs(redis.call('SMEMBERS', BLOBS)) do
    local ref = cjson.decode(json)
    redis.call('UNLINK', PREFIX .. 'blob:' .. ref.id)
    if ref.store == 'shm' and ref.host then
      redis.call('SADD', PREFIX .. 'garbage:' .. ref.host, json)
    end
  end
  redis.call('DEL', BLOBS)
end

-- The only way into a final state.
local function finalise(state, err)
  for _, s in ipairs(stages()) do
    local st = sget(s, 'state')
    if st ~= 'succeeded' and st ~= 'failed' then sset(s, 'state', 'cancelled') end
  end
  set('state', state, 'finished', now())
  local data = '{}'
  if err and err ~= '' then
    set('error', err)
    data = '{"error":' .. err .. '}'
  end
  event('job.' .. state, nil, data)
  free_blobs()
  for _, field in ipairs(redis.call('HKEYS', JOB)) do
    if string.sub(field, 1, 2) == 'a:' then
      redis.call('PEXPIRE', cjson.decode(get(field)).key, RETENTION)
    end
  end
  redis.call('PEXPIRE', JOB, RETENTION)
  redis.call('PEXPIRE', EVENTS, RETENTION)
end
