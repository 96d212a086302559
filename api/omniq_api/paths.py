"""Paths of routes: ``{name:rest}`` is the rest of a path, whatever is in it.

Starlette's own ``path`` ends at a line break, so that a name with one in it would have no route.
"""

from __future__ import annotations

from starlette.convertors import PathConvertor, register_url_convertor


class _Rest(PathConvertor):
    regex = "(?s:.*)"


register_url_convertor("rest", _Rest())
REST = "{name:rest}"
