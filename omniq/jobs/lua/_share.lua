-- Shared as well: who is let in, and in which order (see omniq/jobs/admission.py).
--
-- Sorted sets of the unfinished jobs of a pipeline and of a tenant, by when they were created; lists of when the last ones ended, newest last, begun anew by the first job after a
-- pause: from these the drain rate is measured.
local ENDS = 512
local MEASURED = 30  -- seconds, if there are so many
local WINDOW = '|'   -- between the parts of a name; in no pipeline's or tenant's name

local function open_jobs(pipeline) return PREFIX .. 'open:' .. pipeline end
local function tenant_key(tenant, what) return PREFIX .. 'tenant:' .. tenant .. ':' .. what end
local function ends_of(pipeline) return PREFIX .. 'ends:' .. pipeline end

-- How many unfinished jobs a set holds, without those whose records have been dropped after `ttl` ms.
local function count_open(key, ttl)
  local n = redis.call('ZCARD', key)
  if n > 0 and redis.call('ZREMRANGEBYSCORE', key, '-inf', tonumber(now()) - ttl / 1000) > 0 then
    n = redis.call('ZCARD', key)
  end
  return n
end

-- Another job is among the `before` unfinished ones of that set.
local function note_open(key, ends, before, id)
  redis.call('ZADD', key, now(), id)
  if before == 0 then
    redis.call('DEL', ends)
    redis.call('RPUSH', ends, now())
    redis.call('PEXPIRE', ends, RETENTION)
  end
end

local function note_end(key, ends, id)
  redis.call('ZREM', key, id)
  redis.call('RPUSH', ends, now())
  redis.call('LTRIM', ends, -ENDS, -1)
  redis.call('PEXPIRE', ends, RETENTION)
end

-- Seconds from one job's end to the next, as measured, and nil if none has ended since the pause.
local function pace(ends)
  local n, t = redis.call('LLEN', ends), tonumber(now())
  if n < 2 then return nil end
  local i = math.min(16, n) - 1
  local span = t - tonumber(redis.call('LINDEX', ends, -1 - i))
  while span < MEASURED and i < n - 1 do
    i = math.min(2 * i + 1, n - 1)
    span = t - tonumber(redis.call('LINDEX', ends, -1 - i))
  end
  return math.max(span, 0.001) / i
end

-- When a refused client will find room if it and all that were refused before it come back in turn,
-- in seconds: `places` jobs must have ended for it, and `size` are there.
local function wait_for_room(ends, places, size)
  local each, t = pace(ends), tonumber(now())
  if not each then
    local began = redis.call('LINDEX', ends, 0)
    return began and math.max(1, t - tonumber(began)) or 1
  end
  local turns = ends .. WINDOW .. 'turn'
  local turn = math.max(t, tonumber(redis.call('GET', turns) or '0')) + places * each
  turn = math.min(turn, t + size * each)  -- nobody comes back later than all that is here will be done
  redis.call('SET', turns, string.format('%.6f', turn), 'PX', math.ceil((turn - t) * 1000) + 1)
  return turn - t
end

-- A refusal: whose it is ('share': the tenant's, 'system'), which limit, its value, its present size,
-- when to come back in seconds.
local function refused(whose, limit, value, size, after)
  return {'refused', whose, limit, tostring(value), tostring(size), string.format('%.3f', after)}
end

-- Memory of this server. INFO is costly: its answer holds for a moment.
local LOOKED = 100  -- ms
local MEMORY_WAIT = 15
local function memory()
  local known = redis.call('GET', PREFIX .. 'memory')
  if not known then
    local info = redis.pcall('INFO', 'memory')
    if type(info) == 'table' then info = info.err and '' or info.data or '' end  -- access rules; RESP3
    local function number(name) return string.match(info, '\n' .. name .. ':(%d+)') or '0' end
    known = number('used_memory') - number('mem_not_counted_for_evict') .. '/' .. number('maxmemory')
    redis.call('SET', PREFIX .. 'memory', known, 'PX', LOOKED)
  end
  local used, most = string.match(known, '^(.*)/(.*)$')
  return tonumber(used), tonumber(most)
end

-- The refusal if `more` bytes would bring the server above the watermark, a part of its maxmemory.
local function no_memory(watermark, more)
  local used, most = memory()
  if most > 0 and used + more > watermark * most then
    return refused('system', 'broker_memory', math.floor(watermark * most), used + more, MEMORY_WAIT)
  end
end

-- Bytes of the input files that wait here: a sum, and whose they are, by when they are given up.
local function input_keys() return PREFIX .. 'inputs', PREFIX .. 'inputs:bytes' end
local function forget_input(member)
  local whose, sum = input_keys()
  if redis.call('ZREM', whose, member) == 1 then
    redis.call('DECRBY', sum, string.match(member, '|(%d+)$'))
  end
end

-- Why a job is not let in, see `refused`; or nil, and what has been found, for the script that lets it
-- in. ask: what is asked of admission; bytes: of its record.
local room
local function admit(ask, ttl, bytes)
  local pipeline, tenant = ask.pipeline, ask.tenant
  -- So many jobs must find room, this one and others that come at once.
  local count = ask.count or 1

  -- The tenant's share: jobs at once, a day, and a second (as a token bucket, by the time at which it
  -- will be full again).
  local t = tonumber(now())
  local day = math.floor(t / 86400)
  local found = {
    open = open_jobs(pipeline), ends = ends_of(pipeline),
    their_open = tenant_key(tenant, 'open'), their_ends = tenant_key(tenant, 'ends'),
    their_day = tenant_key(tenant, 'day:' .. day), their_rate = tenant_key(tenant, 'rate'),
  }
  local theirs = tenant ~= '' and count_open(found.their_open, ttl) or 0
  found.theirs = theirs
  if ask.max_jobs and theirs + count > ask.max_jobs then
    local after = wait_for_room(found.their_ends, theirs - ask.max_jobs + count, theirs)
    return refused('share', 'concurrent_jobs', ask.max_jobs, theirs, after)
  end
  if ask.daily then
    found.today = tonumber(redis.call('GET', found.their_day) or '0')
    if found.today + count > ask.daily then
      return refused('share', 'daily_jobs', ask.daily, found.today, (day + 1) * 86400 - t)
    end
  end
  if ask.rate then
    local full_again = tonumber(redis.call('GET', found.their_rate) or '0')
    found.full_again = math.max(t, full_again) + 1 / ask.rate
    found.capacity = ask.burst / ask.rate
    local over = found.full_again + (count - 1) / ask.rate - t - found.capacity
    if over > 1e-6 then return refused('share', 'rate', ask.rate, ask.burst, over) end
  end

  -- The system's limits. No stage can have more jobs waiting than its pipeline has jobs.
  local present = count_open(found.open, ttl)
  found.present = present
  if present + count > ask.most then
    return refused('system', 'pipeline_jobs', ask.most, present,
                   wait_for_room(found.ends, present - ask.most + count, present))
  end
  for i, queue in ipairs(ask.queues) do
    if present >= ask.limits[i] then
      local _, waiting = room({queue}, 0)
      if waiting >= ask.limits[i] then
        return refused('system', 'waiting:' .. queue, ask.limits[i], waiting,
                       wait_for_room(found.ends, waiting - ask.limits[i] + 1, waiting))
      end
    end
  end
  local full = no_memory(ask.watermark, bytes)
  if full then return full end
  local pool = redis.call('GET', PREFIX .. 'full:' .. pipeline)
  if pool then
    local used, most = string.match(pool, '^(%d+)/(%d+)$')
    return refused('system', 'shared_memory', most, used, MEMORY_WAIT)
  end
  return nil, found
end

-- -- the order in which jobs are let go ---------------------------------------------------------
-- Once there are tenants, no more of a pipeline's jobs are in its queues than keep its workers busy
-- (`window` messages a stage). Others are held back: their first messages stay in their records. They
-- are let go in turn, one job of each tenant that has some (start-time fair queueing: each tenant has a
-- tag that grows by one with each of its jobs; the smallest is next), of a tenant's by priority.
-- A string says which queues and which window; a sorted set the tags of tenants with jobs held back; a
-- hash the tags of others (they keep their place), the last tag served ('|now') and the turns.
local function pen(pipeline, part) return PREFIX .. 'pen:' .. pipeline .. (part and WINDOW .. part or '') end
local LEVELS = 10
local PRIORITY_MARK = '\6\22'  -- as in omniq/celery.py

local function level_list(pipeline, tenant, level) return pen(pipeline, tenant .. WINDOW .. level) end

-- How many more messages there is room for in the fullest of a pipeline's queues.
room = function(queues, window)
  local most = 0
  for _, queue in ipairs(queues) do
    local waiting = redis.call('LLEN', queue)
    for p = 1, LEVELS - 1 do waiting = waiting + redis.call('LLEN', queue .. PRIORITY_MARK .. p) end
    most = math.max(most, waiting)
  end
  return window - most, most
end

-- A tenant's next job: by priority, but see _order.lua.
local function next_of(pipeline, tenant)
  local tags, field = pen(pipeline, 'tags'), tenant .. WINDOW .. 'turn'
  local turn = tonumber(redis.call('HGET', tags, field) or FIRST_TURN)
  local from = served_first(turn, LEVELS)
  for i = 0, LEVELS - 1 do
    local at = (from + i) % LEVELS
    local id = redis.call('RPOP', level_list(pipeline, tenant, at))
    if id then
      redis.call('HSET', tags, field, turn_after(turn, at, 1, LEVELS))
      return id
    end
  end
end

-- Do `work` for another job than the script's own.
local function on_job(id, work)
  local job, events, blobs, fields, order, up = JOB, EVENTS, BLOBS, FIELDS, ORDER, UP
  JOB = PREFIX .. 'job:{' .. id .. '}'
  EVENTS, BLOBS, FIELDS, ORDER, UP = JOB .. ':events', JOB .. ':blobs', {}, nil, nil
  local answer = work()
  JOB, EVENTS, BLOBS, FIELDS, ORDER, UP = job, events, blobs, fields, order, up
  return answer
end

-- Send the messages of a job that was held back; false if it has ended meanwhile.
local function send_held()
  fetch('state', 'held')
  local held = get('held')
  if not held then return false end
  redis.call('HDEL', JOB, 'held', 'held_in')
  FIELDS['held'], FIELDS['held_in'] = false, false
  if get('state') ~= 'queued' then return false end
  for _, m in ipairs(cjson.decode(held)) do send(m) end
  return true
end

local LETTING = false
let_go = function(pipeline)
  if LETTING or not pipeline then return end
  local waits = pen(pipeline, 'waits')
  if redis.call('EXISTS', waits) == 0 then return end
  LETTING = true
  local tags = pen(pipeline, 'tags')
  local queues = cjson.decode(redis.call('GET', pen(pipeline)))
  local left = room(queues.queues, queues.window)
  while left > 0 do
    local tenant, tag = unpack(redis.call('ZRANGE', waits, 0, 0, 'WITHSCORES'))
    if not tenant then
      redis.call('DEL', tags, pen(pipeline))  -- all begin anew
      break
    end
    local id = next_of(pipeline, tenant)
    if not id then
      redis.call('ZREM', waits, tenant)
      redis.call('HSET', tags, tenant, tag)
    elseif on_job(id, send_held) then
      redis.call('HSET', tags, WINDOW .. 'now', tag)
      redis.call('ZADD', waits, tonumber(tag) + 1, tenant)
      left = left - 1
    end
  end
  LETTING = false
end

-- Hold the job back: `posts` are what would start it.
local function hold_back(ask, id, posts)
  local pipeline, tenant = ask.pipeline, ask.tenant
  local waits, tags = pen(pipeline, 'waits'), pen(pipeline, 'tags')
  redis.call('SET', pen(pipeline), cjson.encode({queues = ask.queues, window = ask.window}))
  local list = level_list(pipeline, tenant, ask.level)
  set('held', cjson.encode(posts), 'held_in', list)
  redis.call('LPUSH', list, id)
  if not redis.call('ZSCORE', waits, tenant) then
    local known = redis.call('HMGET', tags, WINDOW .. 'now', tenant)
    local tag = math.max(tonumber(known[1] or '0'), tonumber(known[2] or '0'))
    redis.call('ZADD', waits, tag, tenant)
    redis.call('HDEL', tags, tenant)
  end
end

-- A job that had ended is unfinished again, whatever the limits say.
local function take_place(ttl)
  fetch('pipeline', 'tenant')
  local pipeline, tenant = get('pipeline'), get('tenant')
  local open = open_jobs(pipeline)
  note_open(open, ends_of(pipeline), count_open(open, ttl), job_id())
  if tenant then
    local theirs = tenant_key(tenant, 'open')
    note_open(theirs, tenant_key(tenant, 'ends'), count_open(theirs, ttl), job_id())
  end
end

give_up_place = function()
  local id = job_id()
  fetch('pipeline', 'tenant', 'inbytes', 'hook', 'held', 'held_in')
  local pipeline, tenant = get('pipeline'), get('tenant')
  if not pipeline then return end
  if get('held') then
    -- Neither its messages nor its place are kept: who makes and cancels jobs would fill the memory.
    redis.call('HDEL', JOB, 'held', 'held_in')
    redis.call('LREM', get('held_in') or '', -1, id)
  end
  note_end(open_jobs(pipeline), ends_of(pipeline), id)
  if tenant then note_end(tenant_key(tenant, 'open'), tenant_key(tenant, 'ends'), id) end
  if get('inbytes') then forget_input(id .. WINDOW .. get('inbytes')) end
  if get('hook') then
    redis.call('HDEL', JOB, 'hook|tries')  -- of an earlier end
    redis.call('ZADD', PREFIX .. 'webhooks', now(), id)
  end
  let_go(pipeline)
end
