"""Which pipelines the OpenAI-compatible routes serve, and under which model names."""

from __future__ import annotations

from dataclasses import dataclass

from omniq.config.loader import available_pipelines
from omniq.config.pipeline import REQUEST, PipelineConfig
from omniq.config.stage import EngineType, Modality
from omniq.settings import get_settings


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A pipeline as an OpenAI model: one AR stage that reads the request and answers it."""

    name: str
    pipeline: PipelineConfig
    stage: str
    text: str | None
    """Pipeline output that is the stage's text."""
    embedding: str | None
    """Pipeline output that is the stage's pooled embedding."""

    def input_of(self, kind: str) -> str | None:
        """Name of the request's input of that type (``text``, ``messages``, ``token_ids``)."""
        return next((n for n, i in self.pipeline.inputs.items() if i.type == kind), None)

    def output_from(self, source: str) -> str | None:
        """Name of the pipeline output made from the stage's output ``source``."""
        wanted = f"{self.stage}.{source}"
        return next((n for n, o in self.pipeline.outputs.items() if o.source == wanted), None)


def served_models() -> dict[str, ServedModel]:
    """All models by every name they go by: names of ``OMNIQ_SERVED_MODELS``, then pipelines'."""
    pipelines = available_pipelines()
    found: dict[str, ServedModel] = {}
    names = {**get_settings().served_models, **{n: n for n in pipelines}}
    for name, pipeline in names.items():
        if pipeline in pipelines and (model := _as_model(name, pipelines[pipeline])) is not None:
            found[name] = model
    return found


def openai_model(pipeline: PipelineConfig) -> str | None:
    """The first model name of that pipeline; None if the OpenAI routes cannot serve it."""
    return next((n for n, m in served_models().items() if m.pipeline.name == pipeline.name), None)


def _as_model(name: str, pipeline: PipelineConfig) -> ServedModel | None:
    """A pipeline whose every output comes from one AR stage that only the request feeds."""
    makers = {o.producer for o in pipeline.outputs.values()}
    if len(makers) != 1 or len(pipeline.stages) != 1:
        return None
    stage = pipeline.stage(next(iter(makers)))
    if stage.engine_type is not EngineType.AR or pipeline.upstream(stage.stage_id) != []:
        return None
    if any(e.producer != REQUEST for e in pipeline.edges_into(stage.stage_id)):
        return None

    def first(kind: Modality) -> str | None:
        return next((n for n, o in pipeline.outputs.items() if o.type is kind), None)

    return ServedModel(
        name, pipeline, stage.stage_id, first(Modality.TEXT), first(Modality.POOLING)
    )
