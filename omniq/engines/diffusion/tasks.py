"""What a pipeline's components can do: make from text, from a picture, or inside a mask."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omniq.engines.base import StageInput
from omniq.engines.diffusion.inputs import image_input
from omniq.engines.families.base import Family
from omniq.engines.inputs import refuse_input
from omniq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Task:
    """One stock pipeline, and the parameters of its ``__call__`` by name."""

    pipeline: Any
    accepted: Mapping[str, inspect.Parameter]


class Tasks:
    """The stock pipelines of one set of components; a request's pictures pick one.

    Args:
        pipeline: as the model's index names it.
        family: its family.
        pictures: whether the stage's input modalities have images.

    Raises:
        ConfigError: the pipeline works on pictures and the stage has none, or the other way round.
    """

    def __init__(self, pipeline: Any, family: Family, *, pictures: bool) -> None:
        from diffusers import (  # noqa: PLC0415 - slow import
            AutoPipelineForImage2Image,
            AutoPipelineForInpainting,
        )

        self._family, self._name = family, type(pipeline).__name__
        accepted = _accepted(pipeline)
        works_on_pictures = "image" in accepted and not family.pictures_optional
        if works_on_pictures and not pictures:
            raise ConfigError(
                f"{self._name} works on pictures; add image to the stage's input_modalities"
            )
        own = "text"
        if works_on_pictures:
            own = "inpaint" if "mask_image" in accepted else "image"
        self._tasks = {own: Task(pipeline, accepted)}
        if not pictures:
            return
        for name, auto in (
            ("image", AutoPipelineForImage2Image),
            ("inpaint", AutoPipelineForInpainting),
        ):
            if name not in self._tasks and own != "inpaint":
                made = _of_same_components(auto, pipeline)
                if made is None and name == "image":
                    made = _image_pipeline(family.image_pipeline(), pipeline)
                self._tasks |= {} if made is None else {name: Task(made, _accepted(made))}
        if len(self._tasks) == 1 and own == "text":
            raise ConfigError(
                f"{self._name} has no form that takes pictures; "
                "remove image from the stage's input_modalities"
            )

    @property
    def text(self) -> bool:
        """Whether it makes something from text alone."""
        return "text" in self._tasks

    def pick(self, inputs: Mapping[str, StageInput]) -> tuple[Task, dict[str, Any]]:
        """The pipeline for a request, and its pictures as arguments.

        Raises:
            InvalidRequest: pictures are missing, too many, or more than the model can use.
        """
        for name in ("image", "mask_image"):
            if set(self._tasks) == {"text"} and name in inputs:
                refuse_input(name, "this stage takes no pictures; its input_modalities lack image")
        images = image_input(inputs)
        masks = image_input(inputs, "mask_image") if images else []
        if "mask_image" in inputs and not images:
            refuse_input("mask_image", "needs an image that it is the mask of")
        name = "inpaint" if masks else "image" if images else "text"
        if name not in self._tasks:
            if name == "text":
                refuse_input("image", f"missing; {self._name} works on a picture")
            if name == "image":
                refuse_input("mask_image", f"missing; {self._name} works inside a mask")
            refuse_input("mask_image", f"{self._name} has no form that takes a mask")
        most = self._family.most_pictures
        if len(images) > most:
            refuse_input("image", f"{self._name} takes {most}; got {len(images)}")
        if len(masks) > 1:
            refuse_input("mask_image", f"must be one mask; got {len(masks)}")
        given: dict[str, Any] = {}
        if images:
            given["image"] = images if len(images) > 1 else images[0]
        if masks:
            given["mask_image"] = masks[0]
        return self._tasks[name], given


def _accepted(pipeline: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(pipeline.__call__).parameters


def _image_pipeline(class_name: str | None, pipeline: Any) -> Any:
    import diffusers  # noqa: PLC0415 - slow import, already loaded here

    if class_name is None:
        return None
    return _of_same_components(getattr(diffusers, class_name), pipeline)


def _of_same_components(auto: Any, pipeline: Any) -> Any:
    """The pipeline that class makes of the same components; None if diffusers has none."""
    try:
        made = auto.from_pipe(pipeline)
    except ValueError:
        return None
    made.set_progress_bar_config(disable=True)
    return made
