"""A pipeline: a named, versioned graph of stages.

Edges carry one named output of a stage to one named input of another, ``input.<name>`` stands for
the request's own inputs, and ``outputs`` names what the client gets back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import entry_points
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from omniq.config.stage import ConfigModel, Modality, OmniStageConfig

PORT = r"^[a-z][a-z0-9_]{0,31}\.[a-z][a-z0-9_]{0,63}$"
REQUEST = "input"
LEAST_LIMIT = 16
#: Types of inputs that are files.
FILES = ("image", "audio", "video", "latents")
#: Entry points of output handlers, by the names of the types they add.
OUTPUT_HANDLERS = "omniq.outputs"


class InputConfig(ConfigModel):
    """One named input of the request."""

    type: Literal["text", "messages", "token_ids", "image", "audio", "video", "latents"] = Field(
        "text",
        description="'messages' is a conversation as in OpenAI's API, 'token_ids' a list of "
        "integers, 'image', 'audio' and 'video' one or several files, 'latents' a tensor.",
    )
    required: bool = True
    requires: list[str] = Field(
        default_factory=list, description="Inputs without which this one is of no use."
    )
    min_length: int = Field(1, ge=0, description="Characters, or token ids.")
    max_length: int = Field(
        8_000, ge=1, description="Characters (of all messages together), or token ids."
    )
    max_items: int = Field(1, ge=1, le=16, description="Files of this input in one request.")
    max_pixels: int = Field(1 << 24, ge=1, description="Pixels of one picture or frame.")
    max_seconds: float = Field(60.0, gt=0, description="Of one sound or video.")
    max_frames: int = Field(1_024, ge=1, description="Of one video, those that are taken.")
    sample_rate: int = Field(
        16_000, ge=1_000, le=192_000, description="Hertz at which stages get a sound."
    )
    fps: float | None = Field(
        None, gt=0, le=240, description="Frames of a second that are taken of a video; unset: all."
    )
    as_file: bool = Field(
        False, description="Stages get a video as its file, uint8 [bytes], with all that is in it."
    )
    description: str = ""

    @model_validator(mode="after")
    def _file_of_a_video(self) -> InputConfig:
        if self.as_file and (self.type != "video" or self.fps is not None):
            raise ValueError("'as_file' is given with type 'video', and without 'fps'")
        return self


class EdgeConfig(ConfigModel):
    """``source`` (``stage.output`` or ``input.name``) feeds ``target`` (``stage.input``)."""

    source: str = Field(alias="from", pattern=PORT)
    target: str = Field(alias="to", pattern=PORT)
    trigger: Literal["full", "window"] = Field(
        "full", description="'full' waits for the whole output; 'window' for `window` chunks."
    )
    window: int | None = Field(
        None, ge=1, description="Chunks that must be there before the consumer starts."
    )
    window_limit: int | None = Field(
        None,
        ge=1,
        description="Most chunks the consumer may be behind; then the producer waits. "
        f"Default: twice the window, at least {LEAST_LIMIT}.",
    )

    @model_validator(mode="after")
    def _window_needs_size(self) -> EdgeConfig:
        if (self.trigger == "window") != (self.window is not None):
            raise ValueError("'window' is given with trigger 'window', and only then")
        if self.window_limit is not None and (
            self.window is None or self.window_limit < self.window
        ):
            raise ValueError("'window_limit' is given with 'window', and at least as large")
        if self.window is not None and self.producer == REQUEST:
            raise ValueError("an edge from the request has no window: its inputs are there at once")
        return self

    @property
    def limit(self) -> int:
        """Most chunks the consumer of a window edge may be behind."""
        assert self.window is not None, "only edges with a window are streams"
        return self.window_limit or max(2 * self.window, LEAST_LIMIT)

    @property
    def producer(self) -> str:
        """Stage id before the edge, or ``input``."""
        return self.source.partition(".")[0]

    @property
    def consumer(self) -> str:
        """Stage id behind the edge."""
        return self.target.partition(".")[0]


#: Names files, in answers and on disks: no separators, no dots in front.
OutputName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_+-]{0,63}$")]


def _output_type(value: Modality | str) -> Modality | str:
    if isinstance(value, Modality):
        return value
    added = {point.name for point in entry_points(group=OUTPUT_HANDLERS)}
    if value not in added:
        allowed = ", ".join(sorted({*Modality, *added}))
        raise ValueError(f"no output type {value!r}; allowed: {allowed}")
    return value


class OutputConfig(ConfigModel):
    """One named result of the pipeline, made from one stage's output."""

    source: str = Field(alias="from", pattern=PORT)
    type: Annotated[Modality | str, Field(union_mode="left_to_right"), AfterValidator(_output_type)]
    format: str | None = Field(None, description="Encoding, e.g. png; the type's default if unset.")
    sample_rate: int | None = Field(
        None,
        ge=1_000,
        le=192_000,
        description="Samples of a second of sound; needed by type audio, and its only.",
    )

    @model_validator(mode="after")
    def _rate_of_sound(self) -> OutputConfig:
        if (self.type is Modality.AUDIO) != (self.sample_rate is not None):
            raise ValueError("'sample_rate' is given with type 'audio', and only then")
        return self

    def in_format(self, form: str | None) -> OutputConfig:
        """The same in that format; None: as it is."""
        return self if form is None else self.model_copy(update={"format": form})

    @property
    def producer(self) -> str:
        """Stage id the output comes from."""
        return self.source.partition(".")[0]


class PipelineConfig(ConfigModel):
    """A validated pipeline: stages form a DAG in which every edge names existing ends."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    version: int = Field(1, ge=1)
    description: str = ""
    inputs: dict[str, InputConfig] = Field(min_length=1)
    stages: list[OmniStageConfig] = Field(min_length=1)
    edges: list[EdgeConfig] = Field(min_length=1)
    outputs: dict[OutputName, OutputConfig] = Field(min_length=1)
    max_jobs: int | None = Field(
        None, ge=1, description="Most unfinished jobs; default OMNIQ_MAX_JOBS."
    )

    @model_validator(mode="after")
    def _graph(self) -> PipelineConfig:
        ids = [s.stage_id for s in self.stages]
        for i, stage in enumerate(ids):
            if stage == REQUEST:
                raise _fault(
                    f"a stage cannot be called {REQUEST!r}: that names the request", "stages", i
                )
            if stage in ids[:i]:
                raise _fault(f"stage ids must differ: {', '.join(ids)}", "stages", i)
        for i, edge in enumerate(self.edges):
            name = edge.source.partition(".")[2]
            if edge.producer == REQUEST and name not in self.inputs:
                allowed = ", ".join(self.inputs)
                raise _fault(
                    f"edge from {edge.source!r}: no such input; allowed: {allowed}", "edges", i
                )
            if edge.producer not in (REQUEST, *ids):
                raise _no_stage(f"edge from {edge.source!r}", ids, "edges", i)
            if edge.consumer not in ids:
                raise _no_stage(f"edge to {edge.target!r}", ids, "edges", i)
        for name, output in self.outputs.items():
            if output.producer not in ids:
                raise _no_stage(f"output {name!r} from {output.source!r}", ids, "outputs", name)
        for i, stage in enumerate(ids):
            if not any(e.consumer == stage for e in self.edges):
                raise _fault(f"stage {stage!r} has no incoming edge", "stages", i)
        self.topological_order()
        return self

    @model_validator(mode="after")
    def _required_inputs(self) -> PipelineConfig:
        for name, spec in self.inputs.items():
            if unknown := [other for other in spec.requires if other not in self.inputs]:
                allowed = ", ".join(self.inputs)
                raise _fault(
                    f"requires {unknown[0]!r}: no such input; allowed: {allowed}", "inputs", name
                )
        return self

    @model_validator(mode="after")
    def _windows(self) -> PipelineConfig:
        for i, edge in enumerate(self.edges):
            if edge.trigger == "window" and (fault := self._window_fault(edge)) is not None:
                raise _fault(f"edge to {edge.target!r}: {fault}", "edges", i)
        return self

    def _window_fault(self, edge: EdgeConfig) -> str | None:
        """In which graphs the producer would wait for its reader, and the reader for it."""
        beside = [
            e for e in self.edges if (e.producer, e.consumer) == (edge.producer, edge.consumer)
        ]
        if sum(e.source == edge.source for e in beside) > 1:
            return f"stage {edge.consumer!r} reads the chunks of {edge.source!r} once"
        if any(e.trigger == "full" for e in beside):
            return f"all edges from {edge.producer!r} to {edge.consumer!r} have a window, or none"
        for other in self.downstream(edge.producer):
            if other != edge.consumer and self._feeds(other, edge.consumer):
                return (
                    f"no window, because stage {edge.consumer!r} also waits for "
                    f"{edge.producer!r} through {other!r}"
                )
        return None

    def _feeds(self, stage_id: str, below: str) -> bool:
        """Whether ``below`` needs anything of ``stage_id``, directly or not."""
        return stage_id == below or any(self._feeds(s, below) for s in self.downstream(stage_id))

    def stage(self, stage_id: str) -> OmniStageConfig:
        """The stage of that id.

        Raises:
            KeyError: no such stage.
        """
        return self._by_id[stage_id]

    @cached_property
    def _by_id(self) -> dict[str, OmniStageConfig]:
        return {s.stage_id: s for s in self.stages}

    def upstream(self, stage_id: str) -> list[str]:
        """Ids of the stages that feed this one directly, in stage order."""
        return list(self._upstream.get(stage_id, ()))

    @cached_property
    def _upstream(self) -> dict[str, list[str]]:
        ids = [s.stage_id for s in self.stages]
        feeding = {i: {e.producer for e in self.edges if e.consumer == i} for i in ids}
        return {i: [s for s in ids if s in feeding[i]] for i in ids}

    def downstream(self, stage_id: str) -> list[str]:
        """Ids of the stages this one feeds directly, in stage order."""
        fed = {e.consumer for e in self.edges if e.producer == stage_id}
        return [s.stage_id for s in self.stages if s.stage_id in fed]

    def edges_into(self, stage_id: str) -> list[EdgeConfig]:
        """Edges whose target is an input of that stage."""
        return [e for e in self.edges if e.consumer == stage_id]

    def readers_of(self, source: str) -> list[str]:
        """Ids of the stages that read that output (``stage.output``), in stage order."""
        return self._readers.get(source, [])

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for stage in self.stages:
            for source in {e.source for e in self.edges if e.consumer == stage.stage_id}:
                found.setdefault(source, []).append(stage.stage_id)
        return found

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the inputs that are files: pictures, sound, videos and tensors."""
        return tuple(n for n, i in self.inputs.items() if i.type in FILES)

    @cached_property
    def may_name_files(self) -> bool:
        """Whether a request's inputs may be files, or conversations that name some."""
        return bool(self.files) or any(i.type == "messages" for i in self.inputs.values())

    @cached_property
    def takers(self) -> dict[str, list[OmniStageConfig]]:
        """The stages that take each request parameter, by its name."""
        found: dict[str, list[OmniStageConfig]] = {}
        for stage in self.stages:
            for name in stage.parameter_model.model_fields:
                if stage.shared_parameters is None or name in stage.shared_parameters:
                    found.setdefault(name, []).append(stage)
        return found

    def stages_for(self, outputs: Sequence[str]) -> list[str]:
        """Ids of the stages that those of the pipeline's outputs need, in topological order.

        Raises:
            KeyError: no such output.
        """
        needed: set[str] = set()
        more = {self.outputs[name].producer for name in outputs}
        while more:
            needed |= more
            more = {u for s in more for u in self.upstream(s)} - needed
        return [s for s in self.topological_order() if s in needed]

    def only(self, stages: Sequence[str]) -> PipelineConfig:
        """The pipeline without its other stages, and without what they make."""
        if len(stages) == len(self.stages):
            return self
        key = tuple(stages)
        if key not in self._parts:
            mapping = self.model_dump(by_alias=True)
            ends = (REQUEST, *stages)
            mapping["stages"] = [s for s in mapping["stages"] if s["stage_id"] in stages]
            mapping["edges"] = [
                e.model_dump(by_alias=True)
                for e in self.edges
                if e.producer in ends and e.consumer in ends
            ]
            mapping["outputs"] = {
                n: o.model_dump(by_alias=True)
                for n, o in self.outputs.items()
                if o.producer in stages
            }
            self._parts[key] = PipelineConfig.model_validate(mapping)
        return self._parts[key]

    @cached_property
    def _parts(self) -> dict[tuple[str, ...], PipelineConfig]:
        return {}

    def outputs_of(self, stage_id: str) -> dict[str, OutputConfig]:
        """Pipeline outputs made from that stage."""
        return {n: o for n, o in self.outputs.items() if o.producer == stage_id}

    @cached_property
    def is_linear(self) -> bool:
        """Whether the stages form one chain."""
        return (
            all(
                len(self.upstream(s.stage_id)) <= 1 and len(self.downstream(s.stage_id)) <= 1
                for s in self.stages
            )
            and sum(not self.upstream(s.stage_id) for s in self.stages) == 1
        )

    def topological_order(self) -> list[str]:
        """Stage ids, every stage behind all that feed it.

        Raises:
            ValueError: the edges form a cycle.
        """
        return list(self._topological_order)

    @cached_property
    def _topological_order(self) -> list[str]:
        done: list[str] = []
        rest = [s.stage_id for s in self.stages]
        while rest:
            free = [s for s in rest if all(u in done for u in self.upstream(s))]
            if not free:
                raise _fault(f"stages form a cycle: {', '.join(rest)}", "edges")
            done += free
            rest = [s for s in rest if s not in free]
        return done


def _fault(message: str, *place: str | int) -> PydanticCustomError:
    """A ``ValueError`` about one part of a pipeline; the loader finds its line by ``place``."""
    return PydanticCustomError("pipeline", "{message}", {"message": message, "place": place})


def _no_stage(what: str, ids: list[str], *place: str | int) -> PydanticCustomError:
    return _fault(f"{what}: no such stage; allowed: {', '.join(ids)}", *place)
