-- Shared as well: jobs whose client takes some outputs without the others. Field "partial" of such a
-- job says which stage makes each of its outputs; "m:<output>", of those that are given up, which stage
-- failed, and why; "made", of a dead letter that is tried again, which outputs it has had since before.

-- Whether nothing more will come of a stage in this state.
local OVER = {succeeded = true, failed = true, cancelled = true}
local function is_over(stage) return OVER[sget(stage, 'state')] end

-- The set of a stage and of those that it needs, directly or not, added to `found`.
local function with_needed(stage, found)
  if not found[stage] then
    found[stage] = true
    for _, up in ipairs(before(stage)) do with_needed(up, found) end
  end
  return found
end

-- Free what the stages `made_by` have left for others, all of which are over.
local function free_unread(made_by)
  local unread = {}
  for _, u in ipairs(made_by) do
    local done = sget(u, 'state') == 'succeeded'
    for _, s in ipairs(stages()) do
      for _, other in ipairs(before(s)) do done = done and (other ~= u or is_over(s)) end
    end
    unread[u] = done or nil
  end
  if not next(unread) then return end
  for _, json in ipairs(redis.call('SMEMBERS', BLOBS)) do
    local maker = string.match(cjson.decode(json).id, '^[^.]*%.([^.]*)%.')
    if unread[maker] then
      free_blob(json)
      redis.call('SREM', BLOBS, json)
    end
  end
end

-- Go on without the outputs that need a stage which is `lost` (a function of a stage): the stages that
-- nothing else needs are cancelled, and the job ends if all others have succeeded. An output of an earlier
-- try stays, whatever becomes of this one. False if no output would be left, the client takes all or
-- nothing, or it wants none any more. err: JSON object.
local function go_on_without(lost, err)
  local outputs = get('partial')
  if not outputs or get('state') == 'cancelling' then return false end
  outputs = cjson.decode(outputs)
  local made, kept = cjson.decode(get('made') or '{}'), false
  local given_up, needed = {}, {}
  for output, maker in pairs(outputs) do
    if not get('m:' .. output) then
      local needs, culprit = with_needed(maker, {}), nil
      for _, s in ipairs(stages()) do culprit = culprit or needs[s] and lost(s) and s end
      if culprit and made[output] then
        kept = true
      elseif culprit then
        given_up[#given_up + 1] = 'm:' .. output
        given_up[#given_up + 1] = '{"stage":' .. cjson.encode(culprit) .. ',"error":' .. err .. '}'
      else
        with_needed(maker, needed)
      end
    end
  end
  if not next(needed) and not kept then return false end
  if #given_up > 0 then set(unpack(given_up)) end
  local rest = false
  for _, s in ipairs(stages()) do
    if needed[s] then
      rest = rest or sget(s, 'state') ~= 'succeeded'
    elseif not is_over(s) then
      give_up(s)
    end
  end
  if rest then free_unread(stages()) else finalise('succeeded') end
  return true
end
