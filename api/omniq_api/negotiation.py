"""Choosing between two representations by the ``Accept`` header (RFC 9110, section 12.5.1)."""

from __future__ import annotations


def prefers(accept: str, first: str, second: str) -> bool:
    """Whether a client takes media type ``first`` at all, and at least as gladly as ``second``."""
    wanted = quality(accept, first)
    return wanted > 0 and wanted >= quality(accept, second)


def quality(accept: str, media_type: str) -> float:
    """Weight that the most specific matching range gives ``media_type``; 0 if none matches."""
    main = media_type.partition("/")[0]
    specificity = {media_type: 3, f"{main}/*": 2, "*/*": 1}
    best = (0, 0.0)
    for part in accept.lower().split(","):
        media, *parameters = (p.strip() for p in part.split(";"))
        if media in specificity:
            best = max(best, (specificity[media], _weight(parameters)))
    return best[1]


def _weight(parameters: list[str]) -> float:
    """The ``q`` of a range; 1 if absent or unreadable."""
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 1.0
    return 1.0
