-- Take messages off the queues and note them as unacknowledged, in one step: whenever a worker dies
-- after it, they lie where kombu looks for what the dead have left.
-- Returns {1 if all queues are empty now or else 0, how many were undecodable, queue, by how many
-- messages more the caller is known to have room, message...}.
-- KEYS: unacknowledged messages (hash), their tags by time, list for what is no message of kombu's,
-- the queues as they are served. ARGV: most messages; and where the caller is to
-- be known as one that waits (see `hand` in omniq/jobs/lua/_run.lua): the sorted set, its name there,
-- the key that says that it hears, for how many ms, its most deliveries of a message, how many more
-- messages it has room for, how many of these it takes for known.
-- Looking at the queues makes the server tell a connection that has CLIENT TRACKING on of their next
-- change.

-- Tag of a message, and how kombu notes it; nil if it is none.
local function read(item)
  local ok, message = pcall(cjson.decode, item)
  local properties = ok and type(message) == 'table' and message.properties
  local info = type(properties) == 'table' and properties.delivery_info
  if type(info) ~= 'table' then return nil end
  local tag, exchange, key = properties.delivery_tag, info.exchange, info.routing_key
  if type(tag) ~= 'string' or type(exchange) ~= 'string' or type(key) ~= 'string' then return nil end
  return tag, '[' .. item .. ',' .. cjson.encode(exchange) .. ',' .. cjson.encode(key) .. ']'
end

-- Room that is known may have been used up, or grown, since the caller has heard of it.
local waiting, member, had, room = ARGV[2], ARGV[3], 0, 0
if waiting then
  -- A server without memory left refuses what takes some only as a script's first write.
  redis.call('ZREM', waiting, '')
  -- Not ZSCORE: the server would tell the caller of every later change.
  local score = redis.call('ZADD', waiting, 'XX', 'INCR', 0, member)
  if not score and tonumber(ARGV[8]) ~= 0 then return redis.error_reply('LOST its place') end
  had = tonumber(score or '0')
  room = tonumber(ARGV[7]) - (tonumber(ARGV[8]) - had)
end
local most = waiting and math.min(tonumber(ARGV[1]), room) or tonumber(ARGV[1])

-- The lists go by their order, but see _order.lua. The turn is kept in a string that is written only, or
-- the server would tell of it too.
local first, lists, look = 0, #KEYS - 3, {'EXISTS'}
for i = 4, #KEYS do look[i - 2] = KEYS[i] end
local waits = redis.call(unpack(look))
local turns, turn = KEYS[4] .. ':turn', nil
if waits > 1 and most > 0 then
  turn = redis.pcall('INCRBY', turns, 0)
  if type(turn) ~= 'number' or turn == 0 then turn = FIRST_TURN end  -- new; or no memory is left for it
  first = served_first(turn, lists)
  if is_anothers(turn) then most = 1 end
end
local pop, place = {'LMPOP', lists}, {}
for i = 0, lists - 1 do
  local at = (first + i) % lists
  pop[i + 3], place[KEYS[4 + at]] = KEYS[4 + at], at
end
pop[#pop + 1], pop[#pop + 2], pop[#pop + 3] = 'RIGHT', 'COUNT', most
local popped = waits > 0 and most > 0 and redis.call(unpack(pop))
if popped and turn then
  redis.call('SET', turns, turn_after(turn, place[popped[1]], #popped[2], lists), 'PX', 3600000)
end
local taken, tags, records, bad = {0, 0, '', 0}, {}, {}, 0
if popped then
  local t = redis.call('TIME')  -- leases run by the server's clock
  local now = string.format('%d.%06d', t[1], t[2])
  taken[3] = popped[1]
  for _, item in ipairs(popped[2]) do
    local tag, record = read(item)
    if tag then
      taken[#taken + 1] = item
      tags[#tags + 1], tags[#tags + 2] = now, tag
      records[#records + 1], records[#records + 2] = tag, record
    else
      redis.call('LPUSH', KEYS[3], item)
      bad = bad + 1
    end
  end
  if bad > 0 then redis.call('LTRIM', KEYS[3], 0, SET_ASIDE - 1) end
  if #tags > 0 then
    redis.call('ZADD', KEYS[2], unpack(tags))
    redis.call('HSET', KEYS[1], unpack(records))
  end
end
if popped then waits = redis.call(unpack(look)) end
taken[1] = waits == 0 and 1 or 0
taken[2] = bad
if waiting then
  local has = taken[1] == 1 and math.max(0, room - #tags / 2) or 0
  redis.call('ZADD', waiting, has, member)
  redis.call('SET', ARGV[4], ARGV[6], 'PX', ARGV[5])
  taken[4] = has - had
end
return taken
