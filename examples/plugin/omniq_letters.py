"""Four things that a package can add to omniq: a "model" that counts letters, and a scheduler."""

import io
from collections import Counter

from omniq.engines.base import Engine, StageOutput
from omniq.engines.diffusion.scheduler import OmniDiffusionScheduler
from omniq.errors import InvalidRequest
from omniq.outputs import EncodedArtifact, OutputHandler, ProcessedOutput
from omniq.outputs.base import OutputError
from omniq.resolve import ModelFamily


class Letters(ModelFamily):
    """Folders whose config.json says ``"model_type": "letters"``."""

    name = "letters"
    description = "text to a table of its letters"
    stages = ("count",)

    def matches(self, files):
        return (files.json("config.json") or {}).get("model_type") == "letters"

    def build(self, files, options):
        stage = {"stage_id": "count", "engine_type": "AR", "engine": "letters"}
        return {
            "inputs": {"prompt": {"type": "text"}},
            "stages": [{**stage, "model": files.model, "max_in_flight": 8}],
            "edges": [{"from": "input.prompt", "to": "count.prompt"}],
            "outputs": {
                "text": {"from": "count.text", "type": "text"},
                "table": {"from": "count.letters", "type": "csv"},
            },
        }


class LettersEngine(Engine):
    """Counts; a real engine would load ``self.stage.model`` and call ``self.in_thread``."""

    name = "letters"

    async def load(self):
        pass

    async def warmup(self):
        pass

    async def run(self, request, inputs, emit):
        counts = Counter(c for c in inputs["prompt"].value.lower() if c.isalpha())
        if not counts:
            raise InvalidRequest("the prompt has no letters")
        emit.progress(1, 1)
        text = f"{counts.total()} letters"
        return StageOutput(values={"text": text, "letters": sorted(counts.items())})


class CSVHandler(OutputHandler):
    """Rows become a CSV file."""

    formats = ("comma", "tab")

    def encode(self, name, form, data, context):
        if not isinstance(data, list):
            raise OutputError(f"output {name!r}: needs a list of rows")
        file, between = io.StringIO(), "\t" if form == "tab" else ","
        for row in data:
            file.write(between.join(map(str, row)) + "\n")
        artifact = EncodedArtifact(name, "text/csv", file.getvalue().encode(), {"rows": len(data)})
        return ProcessedOutput(artifact=artifact)


class FirstCome(OmniDiffusionScheduler):
    """Denoises requests strictly in the order in which they came, one at a time."""

    def pick(self, waiting, now):
        return [min(waiting, key=lambda ticket: ticket.order)]
