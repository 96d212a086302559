"""Running the pipeline of a model in this process, stage after stage, as workers would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omniq.config import PipelineConfig
from omniq.config.request import validate_request
from omniq.engines import create_engine
from omniq.engines.base import NullEmit, StageInput, StageOutput, StageRequest
from omniq.resolve import BuildOptions, ModelFiles, pipeline_for


def resolved(folder: Path, **options: Any) -> PipelineConfig:
    """What ``omniq serve FOLDER`` serves."""
    return pipeline_for(ModelFiles(str(folder)), BuildOptions(**options))


async def run_stages(
    pipeline: PipelineConfig,
    prompt: str,
    params: dict[str, Any],
    files: dict[str, StageInput] | None = None,
    device: str = "cpu",
) -> dict[str, StageOutput]:
    """Outputs by stage id; parameters are checked and completed as a job's are.

    ``files`` are inputs beside the prompt.
    """
    given = {"prompt": StageInput(prompt), **(files or {})}
    complete = validate_request(
        pipeline, {"prompt": prompt, **dict.fromkeys(files or {}, "")}, params
    )
    made: dict[str, StageOutput] = {}
    for stage_id in pipeline.topological_order():
        inputs = {}
        for edge in pipeline.edges_into(stage_id):
            name, target = edge.source.partition(".")[2], edge.target.partition(".")[2]
            if edge.producer == "input":
                if name in given:
                    inputs[target] = given[name]
                continue
            before = made[edge.producer]
            inputs[target] = StageInput(before.values.get(name), before.tensors.get(name, {}))
        engine = create_engine(pipeline.stage(stage_id), device)
        await engine.load()
        request = StageRequest("test", complete[stage_id])
        made[stage_id] = await engine.run(request, inputs, NullEmit())
        await engine.unload()
    return made
