-- Note that messages are still held, by the server's clock. One that is not any more stays away.
-- KEYS: the tags of unacknowledged messages by time. ARGV: tags.
-- A server without memory left refuses what takes some only as a script's first write.
redis.call('ZREM', KEYS[1], '')
local t = redis.call('TIME')
local now = string.format('%d.%06d', t[1], t[2])
local scores = {}
for i, tag in ipairs(ARGV) do
  scores[2 * i - 1], scores[2 * i] = now, tag
end
return redis.call('ZADD', KEYS[1], 'XX', unpack(scores))
