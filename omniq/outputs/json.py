"""Small structured results, inline."""

from __future__ import annotations

from typing import Any

import orjson

from omniq.outputs.base import OutputContext, OutputError, OutputHandler, ProcessedOutput


class JSONHandler(OutputHandler):
    """Anything that JSON can hold becomes an inline value, unchanged."""

    def encode(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """The value itself."""
        try:
            orjson.dumps(data)
        except TypeError as exc:
            raise OutputError(f"output {name!r}: no JSON: {exc}") from exc
        return ProcessedOutput(value=data)
