-- Shared as well, also by take.lua of the workers: lists that are served by their order. After so many
-- items another list than the first has its turn for a single one: of those that hold some each comes
-- round, so that none starves. With n lists every one is served once in 9 x (n - 1) items at least.
-- A turn is 100 x the next list that has one + items since the last; lists are counted from 0.
local IN_ORDER, FIRST_TURN = 8, 100
local function is_anothers(turn) return turn % 100 >= IN_ORDER end
local function served_first(turn, lists)
  return is_anothers(turn) and math.floor(turn / 100) % lists or 0
end
-- The turn after `count` items of the list `at`.
local function turn_after(turn, at, count, lists)
  if is_anothers(turn) then return 100 * (at % (lists - 1) + 1) end
  return turn - turn % 100 + math.min(99, turn % 100 + count)
end
