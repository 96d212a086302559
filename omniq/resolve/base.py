"""What a model family must say so that a model of it can be served by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omniq.resolve.files import ModelFiles


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What ``omniq serve MODEL`` was told.

    Attributes:
        engine: for the AR stage that answers: ``auto``, ``vllm`` or ``transformers``.
        engine_args: ``engine_args`` of that stage, by vLLM's names; ``dtype`` and
            ``max_num_seqs`` among them where they were given.
        encoder: engine of the stage that encodes prompts for a DiT: ``diffusers`` or ``vllm``.
        gpus: how many GPUs the stages are spread over; 0: there are none.
    """

    engine: str = "auto"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    encoder: str = "diffusers"
    gpus: int = 0


def as_flags(names: Iterable[str]) -> str:
    """Arguments as they are written on the command line, for people."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))


class ModelFamily(ABC):
    """One family of models, and the pipeline that serves a model of it.

    Other packages add families as entry points in the group ``omniq.models``.
    """

    #: As ``omniq models`` and the documentation call it.
    name: ClassVar[str]
    #: A line for people.
    description: ClassVar[str]
    #: Ids of its stages, in their order, for people.
    stages: ClassVar[tuple[str, ...]]

    @abstractmethod
    def matches(self, files: ModelFiles) -> bool:
        """Whether that is a model of the family. Asked of every family, so it must be cheap."""

    @abstractmethod
    def build(self, files: ModelFiles, options: BuildOptions) -> dict[str, Any]:
        """The pipeline, as its YAML file would hold it; ``name`` may be left out.

        Raises:
            ConfigError: something in the model's files is not what the family needs, or the
                options do not fit.
        """
