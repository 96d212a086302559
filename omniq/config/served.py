"""Which pipelines the OpenAI-compatible routes serve, and under which model names."""

from __future__ import annotations

from dataclasses import dataclass

from omniq.config.loader import available_pipelines, is_builtin
from omniq.config.pipeline import REQUEST, PipelineConfig
from omniq.config.stage import EngineType, Modality
from omniq.settings import get_settings


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A pipeline as an OpenAI model: of language, one AR stage that reads the request and answers
    it; or of pictures or of speech, whatever its stages are.
    """

    name: str
    pipeline: PipelineConfig
    stage: str
    """The stage that answers."""
    text: str | None
    """Pipeline output that is the stage's text."""
    embedding: str | None
    """Pipeline output that is the stage's pooled embedding."""
    image: str | None
    """Pipeline output that is a picture, or several of them."""
    audio: str | None = None
    """Pipeline output that is speech."""

    def input_of(self, kind: str) -> str | None:
        """Name of the request's input of that type (``text``, ``messages``, ``token_ids``)."""
        return next((n for n, i in self.pipeline.inputs.items() if i.type == kind), None)

    def picture_inputs(self) -> tuple[str | None, str | None]:
        """Names of the request's inputs for pictures and for a mask, which is the one that feeds a
        stage's ``mask_image``.
        """
        masks = {e.source for e in self.pipeline.edges if e.target.endswith(".mask_image")}
        pictures: dict[bool, str] = {}
        for name, spec in self.pipeline.inputs.items():
            if spec.type == "image":
                pictures.setdefault(f"{REQUEST}.{name}" in masks, name)
        return pictures.get(False), pictures.get(True)

    def output_from(self, source: str) -> str | None:
        """Name of the pipeline output made from the stage's output ``source``."""
        wanted = f"{self.stage}.{source}"
        return next((n for n, o in self.pipeline.outputs.items() if o.source == wanted), None)


def served_models() -> dict[str, ServedModel]:
    """All models by every name they go by: names of ``OMNIQ_SERVED_MODELS``, then pipelines'.

    A pipeline that omniq brings counts if it is the default one: else it mostly has no workers.
    """
    settings, pipelines = get_settings(), available_pipelines()
    found: dict[str, ServedModel] = {}
    names = dict(settings.served_models)
    for own, config in pipelines.items():
        if own == settings.default_pipeline or not is_builtin(config):
            names[own] = own
    for name, pipeline in names.items():
        if pipeline in pipelines and (model := _as_model(name, pipelines[pipeline])) is not None:
            found[name] = model
    return found


def openai_model(pipeline: PipelineConfig) -> ServedModel | None:
    """The pipeline under its first model name; None if the OpenAI routes cannot serve it."""
    return next((m for m in served_models().values() if m.pipeline.name == pipeline.name), None)


def _as_model(name: str, pipeline: PipelineConfig) -> ServedModel | None:
    """A pipeline that makes pictures or speech from a text, or one AR stage that only the request
    feeds.
    """

    def first(kind: Modality) -> str | None:
        return next((n for n, o in pipeline.outputs.items() if o.type is kind), None)

    image = first(Modality.IMAGE)
    reads_text = any(i.type == "text" for i in pipeline.inputs.values())
    if image is not None and reads_text:
        return ServedModel(name, pipeline, pipeline.outputs[image].producer, None, None, image)
    audio, text = first(Modality.AUDIO), first(Modality.TEXT)
    if audio is not None and text is not None and _answers(pipeline, text):
        maker = pipeline.outputs[text].producer
        return ServedModel(name, pipeline, maker, text, None, None, audio)
    if audio is not None and reads_text:
        maker = pipeline.outputs[audio].producer
        return ServedModel(name, pipeline, maker, None, None, None, audio)
    makers = {o.producer for o in pipeline.outputs.values()}
    if len(makers) != 1 or len(pipeline.stages) != 1:
        return None
    stage = next(iter(makers))
    if not _reads_request(pipeline, stage):
        return None
    return ServedModel(name, pipeline, stage, first(Modality.TEXT), first(Modality.POOLING), None)


def _answers(pipeline: PipelineConfig, output: str) -> bool:
    """Whether that output is what an AR stage says to the request alone."""
    return _reads_request(pipeline, pipeline.outputs[output].producer)


def _reads_request(pipeline: PipelineConfig, stage_id: str) -> bool:
    stage = pipeline.stage(stage_id)
    return stage.engine_type is EngineType.AR and all(
        e.producer == REQUEST for e in pipeline.edges_into(stage_id)
    )
