-- See `expire_unserved`. Returns 1 if this has ended the job, else 0.
even_if_full()
return expire_unserved() and 1 or 0
