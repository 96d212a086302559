-- A run has its outputs: write them once; end the job with its last stage. Returns 1, or 0 if refused.
-- ARGV: stage, fence, outputs JSON, metrics JSON, list of blob refs (JSON strings),
-- values {name: JSON string}, artifacts {name: JSON string}.
local stage = ARGV[1]
if get('state') ~= 'running' or not current(stage, ARGV[2]) then return 0 end
local t = now()
set(stage .. '|state', 'succeeded', stage .. '|outputs', ARGV[3], stage .. '|metrics', ARGV[4],
    stage .. '|finished', t)
for _, ref in ipairs(cjson.decode(ARGV[5])) do redis.call('SADD', BLOBS, ref) end
local ttl = redis.call('PTTL', JOB)
if ttl > 0 then redis.call('PEXPIRE', BLOBS, ttl) end
for name, json in pairs(cjson.decode(ARGV[6])) do set('v:' .. name, json) end
for name, json in pairs(cjson.decode(ARGV[7])) do set('a:' .. name, json) end
event('stage.succeeded', stage, '{"metrics":' .. ARGV[4] .. '}')
for _, s in ipairs(stages()) do
  if sget(s, 'state') ~= 'succeeded' then
    for _, up in ipairs(cjson.decode(get('up'))[s] or {}) do
      if up == stage then sset(s, 'queued', t) end
    end
  end
end
for _, s in ipairs(stages()) do
  if sget(s, 'state') ~= 'succeeded' then return 1 end
end
finalise('succeeded')
return 1
