-- End a job whose deadline has passed while nothing of it runs. Returns 1 if this has ended it, else 0.
fetch('state', 'deadline', 'order')
local state, deadline = get('state'), get('deadline')
if not state or FINAL[state] or not deadline or tonumber(now()) <= tonumber(deadline) then return 0 end
if any_stage('running') then return 0 end  -- its worker sees to it
expire()
return 1
