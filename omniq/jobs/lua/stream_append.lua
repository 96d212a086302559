-- Write one entry of a chunk stream. Returns 1; 0 if the run is no longer wanted; -1 if a reader is
-- too far behind. ARGV: stage, fence, sequence, kind (chunk | last | end | error), value JSON, blob
-- reference JSON or '', lease in seconds, readers as JSON [[stage, most chunks behind], ...].
-- KEYS[4] = the stream; KEYS[5...] = the readers' positions, in the order of the readers.
-- Entry ids are <fence>-<sequence>: order, and refusal of what an older run writes, are Redis's own.
local stage, fence, sequence, kind = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local STREAM = KEYS[4]
if get('state') ~= 'running' or not current(stage, fence) then return 0 end
-- After an error mark nothing follows: readers need not wait for the lease to lapse.
sset(stage, 'alive', kind == 'error' and '0' or lease_end(ARGV[7]))
local newest, written = newest_id(STREAM)
if newest == tonumber(fence) and written >= sequence then return 1 end  -- the answer was lost
if kind == 'chunk' or kind == 'last' then
  for i, reader in ipairs(cjson.decode(ARGV[8])) do
    local _, taken = newest_id(KEYS[4 + i])
    if sget(reader[1], 'state') ~= 'succeeded' and sequence - taken >= reader[2] then return -1 end
  end
end
redis.call('XADD', STREAM, fence .. '-' .. ARGV[3], 'kind', kind, 'value', ARGV[5], 'blob', ARGV[6])
if sequence == 0 then expire_with_job(STREAM) end
if ARGV[6] ~= '' then
  redis.call('SADD', BLOBS, ARGV[6])
  expire_with_job(BLOBS)
end
return 1
