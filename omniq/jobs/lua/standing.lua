-- What of a job should have a message: {the job's state or ''}, then for each such stage that has not
-- changed for ARGV[1] seconds its name, state, fence, time of the last change, worker or ''. A job
-- whose deadline has passed unserved ends by this.
even_if_full()
expire_unserved()
local state = get('state')
if not state or FINAL[state] then return {state or ''} end
if get('held') then return {state} end  -- its messages are in its record until it is let go
local found = {state}
local before_then = tonumber(now()) - tonumber(ARGV[1])
for _, s in ipairs(stages()) do
  if should_have_message(s) then
    local since = last_change(s)
    if tonumber(since) <= before_then then
      for _, value in ipairs({s, sget(s, 'state'), sget(s, 'fence') or '0', since, sget(s, 'worker') or ''}) do
        found[#found + 1] = value
      end
    end
  end
end
return found
