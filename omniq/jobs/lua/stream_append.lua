-- Write one entry of a chunk stream. Returns 1; 0 if the run is no longer wanted; -1 if a reader is
-- too far behind; -2 if the job goes on without all its readers: the entry is not kept. ARGV: stage,
-- fence, sequence, kind (chunk | last | end | error), value JSON, blob reference JSON or '', lease in
-- seconds, readers as JSON [[stage, most chunks behind or 0 for any number], ...].
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
  local readers, given_up = cjson.decode(ARGV[8]), 0
  for i, reader in ipairs(readers) do
    local state, limit = sget(reader[1], 'state'), reader[2]
    if not OVER[state] then
      local _, taken = newest_id(KEYS[4 + i])
      if limit > 0 and sequence - taken >= limit then return -1 end
    elseif state ~= 'succeeded' then
      given_up = given_up + 1
    end
  end
  if given_up > 0 and given_up == #readers then return -2 end
end
redis.call('XADD', STREAM, fence .. '-' .. ARGV[3], 'kind', kind, 'value', ARGV[5], 'blob', ARGV[6])
if sequence == 0 then expire_with_job(STREAM) end
if ARGV[6] ~= '' then
  redis.call('SADD', BLOBS, ARGV[6])
  expire_with_job(BLOBS)
end
return 1
