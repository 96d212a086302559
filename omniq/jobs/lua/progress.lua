-- Note progress or a delta of a run. Returns 1, or 0 if the run is no longer wanted.
-- ARGV: stage, fence, event type, data JSON, step or '', total or ''.
if get('state') ~= 'running' or not current(ARGV[1], ARGV[2]) then return 0 end
if ARGV[5] ~= '' then
  sset(ARGV[1], 'step', ARGV[5])
  sset(ARGV[1], 'total', ARGV[6])
end
event(ARGV[3], ARGV[1], ARGV[4])
return 1
