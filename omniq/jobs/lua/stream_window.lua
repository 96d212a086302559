-- The first window of what `stage` streams to `reader` is there: once for each run of `stage` note it,
-- and send for the reader if it has all its inputs; else its last input does. Returns 1 if sent.
-- ARGV: stage, fence, reader, message to it (see `messages`). KEYS[4] = its queue.
local stage, fence, reader = ARGV[1], ARGV[2], ARGV[3]
if get('state') ~= 'running' or not current(stage, fence) then return 0 end
local field = 'window:' .. stage
if sget(reader, field) == fence then return 0 end
sset(reader, field, fence)
local state = sget(reader, 'state')
if OVER[state] or not handed(reader) then return 0 end
if state == 'queued' then sset(reader, 'queued', now()) end
for _, m in ipairs(messages(4, 4)) do send(m) end
return 1
