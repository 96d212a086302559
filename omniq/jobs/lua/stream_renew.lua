-- The run that writes a stage's chunk streams is alive. Returns 1, or 0 if it is not wanted.
-- ARGV: stage, fence, lease in seconds.
if get('state') ~= 'running' or not current(ARGV[1], ARGV[2]) then return 0 end
sset(ARGV[1], 'alive', lease_end(ARGV[3]))
return 1
