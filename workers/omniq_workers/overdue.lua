-- Messages whose lease has lapsed, by the server's clock, newest first: {tag, record, tag, record...}.
-- KEYS: unacknowledged messages (hash), their tags by time. ARGV: seconds of a lease, most messages.
-- A server without memory left refuses what takes some only as a script's first write.
redis.call('ZREM', KEYS[2], '')
local t = redis.call('TIME')
local now = tonumber(t[1]) + tonumber(t[2]) / 1000000
local lease, most = tonumber(ARGV[1]), ARGV[2]
-- Noted before the clock was set back: their leases begin anew. Whoever lives renews them by then.
for _, tag in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], now + lease, '+inf', 'LIMIT', 0, most)) do
  redis.call('ZADD', KEYS[2], 'XX', string.format('%.6f', now), tag)
end
local tags = redis.call('ZREVRANGEBYSCORE', KEYS[2], string.format('%.6f', now - lease), '-inf',
                        'LIMIT', 0, most)
local found = {}
for _, tag in ipairs(tags) do
  local record = redis.call('HGET', KEYS[1], tag)
  if record then
    found[#found + 1], found[#found + 2] = tag, record
  else
    redis.call('ZREM', KEYS[2], tag)
  end
end
return found
