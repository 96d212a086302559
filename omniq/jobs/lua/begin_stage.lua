-- A worker received a stage task; see `begin`.
-- ARGV: stage, worker, redelivered (0/1), most deliveries.
even_if_full()
return begin(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]))
