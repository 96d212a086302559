-- Accept a job: record (state queued), index, first event, and the messages that start it. Returns
-- {'created', jobs left today or '', jobs that may come at once or '', seconds until that is all it may
-- be or ''}, {'exists'} if the id does, {'same', job id} or {'conflict'} if its idempotency key is known,
-- or a refusal (see `refused`).
-- KEYS[4] = index of all jobs, KEYS[5...] = queues. ARGV: spec JSON, stages JSON, upstream JSON, id,
-- created, ttl ms, deadline or '', channel of who waits for its end or '', list of refs (JSON strings)
-- of the blobs among its inputs, what is asked of admission (JSON, see omniq/jobs/admission.py),
-- stages by the outputs they make, if some of these are taken without the others (JSON), or '',
-- messages (see `messages`).
local id, ttl, ask = ARGV[4], tonumber(ARGV[6]), cjson.decode(ARGV[10])
local pipeline, tenant = ask.pipeline, ask.tenant
local named = tenant ~= ''

local same = ask.idempotency and PREFIX .. 'idempotency:' .. ask.idempotency
if same then
  local known = redis.call('GET', same)
  if known then
    local print, job = string.match(known, '^(%S+) (%S+)$')
    if redis.call('EXISTS', PREFIX .. 'job:{' .. job .. '}') == 1 then
      return print == ask.print and {'same', job} or {'conflict'}
    end
  end
end
if redis.call('EXISTS', JOB) == 1 then return {'exists'} end
unless_full()

local refusal, place = admit(ask, ttl, #ARGV[1])
if refusal then return refusal end
local open, ends, present = place.open, place.ends, place.present
local t = tonumber(now())

local record = {'spec', ARGV[1], 'order', ARGV[2], 'up', ARGV[3], 'state', 'queued', 'created', ARGV[5],
                'pipeline', pipeline}
local function add(field, value)
  record[#record + 1] = field
  record[#record + 1] = value
end
if named then add('tenant', tenant) end
if ARGV[7] ~= '' then add('deadline', ARGV[7]) end
if ARGV[8] ~= '' then add('w:' .. ARGV[8], '') end
if ask.hook then add('hook', ask.hook) end
if ARGV[11] ~= '' then add('partial', ARGV[11]) end
if ask.inbytes then
  local member = id .. WINDOW .. ask.inbytes
  local whose, sum = input_keys()
  -- Kept for as long as the job; one whose reservation has lapsed comes back.
  if redis.call('ZADD', whose, t + ttl / 1000, member) == 1 then redis.call('INCRBY', sum, ask.inbytes) end
  add('inbytes', ask.inbytes)
end
for _, s in ipairs(cjson.decode(ARGV[2])) do add(s .. '|state', 'queued') end
set(unpack(record))
event('job.queued')
redis.call('PEXPIRE', JOB, ttl)
redis.call('PEXPIRE', EVENTS, ttl)
if ARGV[9] ~= '[]' then
  redis.call('SADD', BLOBS, unpack(cjson.decode(ARGV[9])))
  redis.call('PEXPIRE', BLOBS, ttl)
end
-- Records older than any that anybody is still told of leave the indices.
local oldest = '(' .. (tonumber(ARGV[5]) - (ttl + RETENTION + ask.tombstones) / 1000)
local indices = {KEYS[4], named and KEYS[4] .. ':' .. tenant or nil}
for _, index in ipairs(indices) do
  redis.call('ZADD', index, ARGV[5], id)
  redis.call('ZREMRANGEBYSCORE', index, '-inf', oldest)
end
note_open(open, ends, present, id)
if named then note_open(place.their_open, place.their_ends, place.theirs, id) end
if same then redis.call('SET', same, ask.print .. ' ' .. id, 'PX', ask.idempotency_ttl) end
if ask.daily then redis.call('SET', place.their_day, place.today + 1, 'EX', 2 * 86400) end
local full_again, capacity = place.full_again, place.capacity
if ask.rate then
  redis.call('SET', place.their_rate, string.format('%.6f', full_again), 'PX', math.ceil((full_again - t) * 1000) + 1)
end

local posts = messages(12, 5)
-- Who is held back goes first, also when the last key has been revoked since.
local shared = #posts > 0 and redis.call('EXISTS', PREFIX .. 'api_keys', pen(pipeline, 'waits')) > 0
if shared and (redis.call('EXISTS', pen(pipeline, 'waits')) == 1
               or present >= ask.window and room(ask.queues, ask.window) <= 0) then
  hold_back(ask, id, posts)
  let_go(pipeline)
else
  for _, m in ipairs(posts) do send(m) end
end
return {'created', ask.daily and tostring(ask.daily - place.today - 1) or '',
        ask.rate and tostring(math.floor((capacity - (full_again - t)) * ask.rate + 1e-6)) or '',
        ask.rate and string.format('%.3f', full_again - t) or ''}
