"""Which requests take the next denoise step together."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from omniq.engines.diffusion.step_times import StepTimes
from omniq.errors import ConfigError

ENTRY_POINTS = "omniq.dit_schedulers"
#: Seconds of waiting that lift a request by one priority.
AGING = 10.0
#: A deadline is urgent when less than so many times the remaining work is left.
URGENT = 2.0
_counter = itertools.count()


@dataclass(slots=True, eq=False)
class Ticket:
    """One image's or video's denoising, as the scheduler sees it.

    ``priority``: 0 is the most important. ``deadline``: seconds on the monotonic clock, or None.
    ``group``: requests of one group can share a forward; it may change from step to step.
    ``rows``: samples in its next forward. ``served``: seconds of forwards, its share of each.
    ``since``: when it began to wait for its next step.
    """

    request_id: str
    priority: int = 5
    deadline: float | None = None
    group: Hashable = None
    rows: int = 1
    steps_done: int = 0
    steps_total: int = 0
    served: float = 0.0
    since: float = 0.0
    order: int = field(default_factory=lambda: next(_counter))


class OmniDiffusionScheduler:
    """Fair between groups, then between requests; never waits for an incompatible head.

    The next forward goes to the group with the most urgent request: near its deadline first, then
    by priority (which rises while a request waits), then the group that was served least. In the
    group those with the least left to do go first: of requests that share a batch, that order ends
    most of them early, and the long ones no later than taking turns would. The batch is filled as
    far as :class:`StepTimes` has measured it to pay.

    Subclasses replace :meth:`pick`; the entry point group ``omniq.dit_schedulers`` names them.

    Args:
        times: measured times and limits.
    """

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._served: dict[Hashable, float] = {}

    def pick(self, waiting: Sequence[Ticket], now: float) -> list[Ticket]:
        """Those of ``waiting`` (not empty) that go next: all of one group, the lead first."""
        self._forget({t.group for t in waiting})
        lead = min(waiting, key=lambda t: (self._rank(t, now), self._group_served(t), _own(t)))
        mates = [t for t in waiting if t.group == lead.group]
        mates.sort(key=lambda t: (t is not lead, self._rank(t, now), _own(t)))
        available = sum(t.rows for t in mates)
        room = self.times.limit(lead.group, min(t.rows for t in mates), available)
        picked = [lead]
        room -= lead.rows
        for mate in mates[1:]:
            if mate.rows <= room:
                picked.append(mate)
                room -= mate.rows
        return picked

    def charge(self, picked: Sequence[Ticket], seconds: float, now: float) -> None:
        """A forward of ``picked`` took so long, and ended ``now``."""
        rows = sum(t.rows for t in picked)
        for ticket in picked:
            ticket.served += seconds * ticket.rows / rows
            ticket.since = now
        group = picked[0].group
        self._served[group] = self._served.get(group, 0.0) + seconds

    def _rank(self, ticket: Ticket, now: float) -> int:
        if ticket.deadline is not None:
            step = self.times.seconds(ticket.group, ticket.rows) or 0.0
            work = step * (ticket.steps_total - ticket.steps_done)
            if now + URGENT * work >= ticket.deadline:
                return -1_000_000
        return ticket.priority - int((now - ticket.since) / AGING)

    def _group_served(self, ticket: Ticket) -> float:
        return self._served[ticket.group]

    def _forget(self, groups: set[Hashable]) -> None:
        """Keep the service of groups that wait; a new one starts level with the least served."""
        self._served = {g: s for g, s in self._served.items() if g in groups}
        level = min(self._served.values(), default=0.0)
        for group in groups:
            self._served.setdefault(group, level)


def _own(ticket: Ticket) -> tuple[int, float, int]:
    left = (ticket.steps_total - ticket.steps_done) * ticket.rows
    return left, ticket.served, ticket.order


BUILTIN: dict[str, type[OmniDiffusionScheduler]] = {"fair": OmniDiffusionScheduler}


def create_scheduler(name: str, times: StepTimes) -> OmniDiffusionScheduler:
    """The scheduler of that name: built in, or an entry point in ``omniq.dit_schedulers``.

    Raises:
        ConfigError: no such scheduler; the message lists those there are.
    """
    points = {p.name: p for p in entry_points(group=ENTRY_POINTS) if p.name not in BUILTIN}
    if name in BUILTIN:
        return BUILTIN[name](times)
    if name not in points:
        raise ConfigError(f"no DiT scheduler {name!r}; allowed: {', '.join([*BUILTIN, *points])}")
    try:
        found = points[name].load()
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"DiT scheduler {name!r} cannot be loaded: {exc}") from exc
    if not (isinstance(found, type) and issubclass(found, OmniDiffusionScheduler)):
        raise ConfigError(f"DiT scheduler {name!r}: {found!r} is no OmniDiffusionScheduler")
    return found(times)
