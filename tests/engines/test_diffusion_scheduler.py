"""Who takes the next denoise step, and how large a batch pays."""

from __future__ import annotations

import pytest

from omniq.engines.diffusion.scheduler import AGING, OmniDiffusionScheduler, Ticket
from omniq.engines.diffusion.step_times import RETRY_AFTER, RETRY_MEMORY_AFTER, StepTimes


def scheduler(max_rows: int = 8) -> OmniDiffusionScheduler:
    return OmniDiffusionScheduler(StepTimes(max_rows, always=True))


def ticket(name: str, group: str = "a", **more: object) -> Ticket:
    return Ticket(name, group=group, **more)  # type: ignore[arg-type]


def names(picked: list[Ticket]) -> list[str]:
    return [t.request_id for t in picked]


def served(scheduler: OmniDiffusionScheduler, tickets: list[Ticket], steps: int) -> dict[str, int]:
    """How many of ``steps`` forwards of one second each took part in, by request."""
    counts = {t.request_id: 0 for t in tickets}
    for second in range(steps):
        picked = scheduler.pick(tickets, float(second))
        for one in picked:
            counts[one.request_id] += 1
        scheduler.charge(picked, 1.0, second + 1.0)
    return counts


def test_one_group_goes_together_up_to_the_limit() -> None:
    tickets = [ticket(str(i)) for i in range(5)]
    assert names(scheduler(3).pick(tickets, 0.0)) == ["0", "1", "2"]
    assert len(scheduler(8).pick(tickets, 0.0)) == 5


def test_guidance_counts_its_rows() -> None:
    tickets = [ticket("a", rows=2), ticket("b", rows=2), ticket("c", rows=1)]
    assert names(scheduler(3).pick(tickets, 0.0)) == ["a", "c"]


def test_a_request_larger_than_the_limit_runs_alone() -> None:
    assert names(scheduler(1).pick([ticket("a", rows=2), ticket("b", rows=2)], 0.0)) == ["a"]


def test_groups_get_equal_shares_whatever_their_size() -> None:
    tickets = [ticket(f"a{i}", "a") for i in range(6)] + [ticket("b", "b")]
    counts = served(scheduler(8), tickets, 10)
    assert counts["b"] == 5
    assert counts["a0"] == 5


def test_an_incompatible_head_blocks_nobody() -> None:
    """The oldest of another group has had its share; the others go on."""
    tickets = [ticket("head", "x"), ticket("b", "y"), ticket("c", "y")]
    counts = served(scheduler(), tickets, 4)
    assert counts == {"head": 2, "b": 2, "c": 2}


def test_least_left_to_do_goes_first_within_a_group() -> None:
    """A short request overtakes a long one, and the nearly done one is not put off by either."""
    long, short = ticket("long", steps_total=30), ticket("short", steps_total=8)
    ending = ticket("ending", steps_total=30, steps_done=27, served=9.0)
    guided = ticket("guided", rows=2, steps_total=8)
    assert names(scheduler(3).pick([long, guided, short, ending], 0.0)) == [
        "ending",
        "short",
        "long",
    ]
    assert names(scheduler(8).pick([long, guided, short], 0.0)) == ["short", "guided", "long"]


def test_of_equal_requests_the_least_served_goes_first() -> None:
    old, new = ticket("old", served=9.0), ticket("new")
    assert names(scheduler(1).pick([old, new], 0.0)) == ["new"]


def test_priority_comes_before_fairness_and_waiting_raises_it() -> None:
    low, high = ticket("low", "a", priority=6), ticket("high", "b", priority=5)
    one = scheduler()
    for second in range(5):
        picked = one.pick([low, high], float(second))
        assert names(picked) == ["high"]
        one.charge(picked, 1.0, float(second))
    assert names(one.pick([low, high], 2 * AGING + 5)) == ["high"]  # both have waited, low less
    high.since = 3 * AGING
    assert names(one.pick([low, high], 3 * AGING)) == ["low"]


def test_a_near_deadline_comes_before_priority() -> None:
    times = StepTimes(8, always=True)
    for _ in range(3):
        times.record("a", 1, 1.0)
    one = OmniDiffusionScheduler(times)
    late = ticket("late", "a", priority=9, deadline=100.0, steps_total=10)
    other = ticket("other", "b", priority=0)
    assert names(one.pick([late, other], 0.0)) == ["other"]
    assert names(one.pick([late, other], 85.0)) == ["late"]
    late.steps_done = 9
    assert names(one.pick([late, other], 85.0)) == ["other"]


def test_groups_that_are_gone_are_forgotten() -> None:
    one = scheduler()
    for i in range(1000):
        picked = one.pick([ticket("t", f"group{i}")], 0.0)
        one.charge(picked, 1.0, 0.0)
    assert len(one._served) <= 2


def measured(seconds: dict[int, float]) -> StepTimes:
    times = StepTimes(8)
    for rows, value in seconds.items():
        for _ in range(3):
            times.record("k", rows, value)
    return times


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, 1),  # first alone, to have something to compare with
        ({1: 1.0}, 2),
        ({1: 1.0, 2: 1.1}, 4),
        ({1: 1.0, 2: 2.0}, 1),
        ({1: 1.0, 2: 1.1, 4: 2.3}, 2),
        ({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4}, 8),
        ({1: 1.0, 2: 1.1, 4: 1.2, 8: 2.5}, 4),
    ],
)
def test_batches_grow_as_long_as_they_pay(seconds: dict[int, float], expected: int) -> None:
    assert measured(seconds).limit("k", 1, 8) == expected


def test_a_batch_is_no_larger_than_what_is_there() -> None:
    times = measured({1: 1.0, 2: 1.1})
    assert times.limit("k", 1, 3) == 3  # measured next
    assert times.limit("k", 2, 2) == 2


def test_what_did_not_pay_is_tried_again_after_a_while() -> None:
    times = measured({1: 1.0, 2: 2.0})
    assert times.limit("k", 1, 8) == 1
    found = set()
    for _ in range(RETRY_AFTER):
        times.record("k", 1, 1.0)
        found.add(times.limit("k", 1, 8))
    assert found == {1, 2}


def test_misleading_first_samples_do_not_stop_batching_for_long() -> None:
    """A single row with a short prompt, then two with long ones: batching seems not to pay."""
    times = StepTimes(8)
    real = {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}
    for rows, seconds in ((1, 0.5), (2, 2.0)):
        for _ in range(3):
            times.record("k", rows, seconds)
    chosen = []
    for _ in range(8 * RETRY_AFTER):
        chosen.append(times.limit("k", 1, 8))
        times.record("k", chosen[-1], real[chosen[-1]])
    assert chosen[0] == 1
    assert chosen[-RETRY_AFTER:] == [8] * RETRY_AFTER


def test_first_run_of_a_size_is_not_timed() -> None:
    times = StepTimes(8)
    times.record("k", 1, 100.0)  # compiles
    assert times.seconds("k", 1) is None
    times.record("k", 1, 1.0)
    assert times.seconds("k", 1) == 1.0
    assert times.seconds("k", 4) == 4.0
    assert times.seconds("other", 1) is None


def test_memory_bounds_the_batch_and_recovers() -> None:
    times = StepTimes(8, always=True)
    times.ran_out("k", 8)
    assert times.limit("k", 1, 8) == 4
    times.ran_out("k", 4)
    assert times.limit("k", 1, 8) == 2
    for _ in range(RETRY_MEMORY_AFTER):
        times.record("k", 2, 1.0)
    assert times.limit("k", 1, 8) == 4
