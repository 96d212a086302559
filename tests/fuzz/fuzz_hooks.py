"""What schemathesis is told of the system besides its schema, and what it tells of the answers."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response

#: The file that gets the number of answers by status, and the like.
REPORT = "FUZZ_REPORT"
#: Bodies that take parameters of pipelines at the top level, where an unknown one is a fault.
OPEN = (
    "ChatRequest", "CompletionRequest", "EmbeddingRequest", "ImageRequest", "ImageEditRequest",
    "SpeechRequest",
)  # fmt: skip


@schemathesis.hook
def before_load_schema(context: HookContext, raw_schema: dict[str, Any]) -> None:
    """Lets about half of the bodies be right ones.

    What a pipeline takes is not in the schema. The examples are for the built-in pipeline, which
    has no workers here; ``paint`` has.
    """
    changed = json.loads(json.dumps(raw_schema).replace("tiny-omni", "paint"))
    schemas = changed["components"]["schemas"]
    for name in OPEN:
        schemas[name]["additionalProperties"] = False
    fields = schemas["JobRequest"]["properties"]
    prompt = {
        "type": "object",
        "properties": {"prompt": {"type": "string", "minLength": 1}},
        "required": ["prompt"],
        "additionalProperties": False,
    }
    nothing = {"type": "object", "maxProperties": 0}
    fields["input"] = {"anyOf": [prompt, fields["input"]]}
    for name in ("parameters", "formats"):
        fields[name] = {"anyOf": [nothing, fields[name]]}
    fields["outputs"] = {"anyOf": [{"type": "null"}, fields["outputs"]]}
    raw_schema.clear()
    raw_schema.update(changed)


@schemathesis.check
def no_traceback(context: CheckContext, response: Response, case: Case) -> None:
    """Nothing of the server's inside is shown, but for dead letters, which are the operator's."""
    if not case.path.startswith("/v1/dlq"):
        assert b"Traceback (most recent call last)" not in response.content


@schemathesis.check
class Answers:
    """Counts them; no failure."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.slowest = 0.0

    def after_response(self, context: CheckContext, response: Response, case: Case) -> None:
        self.statuses[response.status_code] += 1
        self.slowest = max(self.slowest, response.elapsed)

    def after_run(self, context: CheckContext) -> None:
        found = {"statuses": self.statuses, "slowest": self.slowest}
        Path(os.environ[REPORT]).write_text(json.dumps(found))
