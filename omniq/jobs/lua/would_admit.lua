-- Whether a job would be let in now, before its files are read and written; `create` asks again.
-- Returns {} or a refusal. ARGV: what is asked of admission (JSON), ttl ms.
unless_full()
return admit(cjson.decode(ARGV[1]), tonumber(ARGV[2]), 0) or {}
