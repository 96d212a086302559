-- Shared as well: what the reconciler compares (omniq/jobs/reconcile.py).

-- Time of the last change of a stage, as it was written.
local function last_change(stage)
  local last = get('created')
  for _, field in ipairs({'queued', 'started', 'finished'}) do
    local at = sget(stage, field)
    if at and tonumber(at) > tonumber(last) then last = at end
  end
  return last
end

-- Whether a message should exist for a stage: it is not done, and what it needs is there in full. Of a
-- job that is being cancelled: what runs, though what feeds it may have ended without success.
local WITH_MESSAGE = {queued = true, retrying = true, running = true}
local function should_have_message(stage)
  if get('state') == 'cancelling' then return sget(stage, 'state') == 'running' end
  if not WITH_MESSAGE[sget(stage, 'state')] then return false end
  for _, up in ipairs(before(stage)) do
    if sget(up, 'state') ~= 'succeeded' then return false end
  end
  return true
end
