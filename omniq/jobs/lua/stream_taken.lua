-- A reader has done with the first `position` chunks. Returns 1, or 0 if its run is not wanted.
-- ARGV: reader, its fence, position. KEYS[4] = the reader's position: a stream of one entry with the
-- id <fence>-<position>, so that a newer run starts over and an older one is ignored.
local state = sget(ARGV[1], 'state')
if get('state') ~= 'running' or sget(ARGV[1], 'fence') ~= ARGV[2]
  or (state ~= 'running' and state ~= 'succeeded') then return 0 end
local fence, position = newest_id(KEYS[4])
local mine = tonumber(ARGV[2])
if fence < mine or (fence == mine and position < tonumber(ARGV[3])) then
  redis.call('XADD', KEYS[4], 'MAXLEN', 1, ARGV[2] .. '-' .. ARGV[3], 'at', now())
  expire_with_job(KEYS[4])
end
return 1
