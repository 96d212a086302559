"""Decoding speech by windows while its codes are still made.

Sizes are in frames of the mel spectrogram. A window is ``chunk`` new frames with ``future`` frames
behind them for the model to look at; sound of the last ``overlap`` frames is held back until what
follows them is known, as the vocoder's filters reach that far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def growing(first: int, most: int) -> Iterator[int]:
    """Lengths of windows: ``first``, twice as long each time, up to ``most``.

    A short first one is heard soon; a listener has the next in time where a window takes half as
    long to make as to hear. Lengths depend on nothing else, so that a run that is begun anew says
    the same.
    """
    length = min(first, most)
    while True:
        yield length
        length = min(2 * length, most)


@dataclass(frozen=True, slots=True)
class Window:
    """Frames ``begin`` to ``stop`` go in; of what comes out, those to ``end`` are taken."""

    begin: int
    end: int
    stop: int
    rest: bool = False
    """Whether it is what the end has left over; nothing follows."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """See the module."""

    chunk: int
    future: int
    overlap: int
    first: int | None = None
    """New frames of the first window, from which they grow to ``chunk``; None: there is no other
    length.
    """


class Windows:
    """The windows of one utterance, as its frames become known."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._begin = 0
        self._lengths = growing(sizes.first or sizes.chunk, sizes.chunk)
        self._next = next(self._lengths)

    def ready(self, known: int, *, ended: bool) -> Iterator[Window]:
        """Windows that can be computed now.

        Args:
            known: frames whose codes are there.
            ended: none will follow: the last window holds all that is left.
        """
        sizes = self._sizes
        while known >= self._begin + self._next + sizes.future:
            end = self._begin + self._next
            yield Window(self._begin, end, end + sizes.future)
            self._begin, self._next = end, next(self._lengths)
        if ended and known > self._begin:
            yield Window(self._begin, known, known, rest=True)
            self._begin = known


@dataclass(frozen=True, slots=True)
class Sound:
    """Frames ``start`` to ``stop`` go into the vocoder; ``begin`` to ``end`` are played."""

    start: int
    stop: int
    begin: int
    end: int


class Overlap:
    """Which frames the vocoder gets as they come, and which of its sound is new and final."""

    def __init__(self, overlap: int) -> None:
        self._overlap = overlap
        self._played = 0

    @property
    def needed(self) -> int:
        """The first frame that will go in again."""
        return max(self._played - self._overlap, 0)

    def ready(self, known: int, *, ended: bool) -> Sound | None:
        """The next stretch, or None while there is none."""
        end = known if ended else known - self._overlap
        if end <= self._played:
            return None
        sound = Sound(self.needed, known, self._played, end)
        self._played = end
        return sound
