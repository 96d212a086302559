-- Pass a chunk of a pipeline output on to whoever watches the job. Returns 1, or 0 if the run is no
-- longer wanted. ARGV: stage, fence, delta JSON, artifact name or '', artifact JSON.
local stage = ARGV[1]
if get('state') ~= 'running' or not current(stage, ARGV[2]) then return 0 end
if ARGV[4] ~= '' then
  local field = 'a:' .. ARGV[4]
  local before = get(field)
  if before and before ~= ARGV[5] then redis.call('UNLINK', cjson.decode(before).key) end
  set(field, ARGV[5])
end
event('stage.delta', stage, ARGV[3])
return 1
