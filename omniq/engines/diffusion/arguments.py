"""A request's parameters as arguments of its pipeline, checked against what that takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omniq.engines.families.base import Family
from omniq.errors import InvalidRequest

#: Parameters that go to ``__call__`` by their own name.
PASSED_ON = (
    *("height", "width", "num_frames", "num_inference_steps", "sigmas", "strength"),
    "guidance_scale_2",
)


def call_arguments(
    params: Mapping[str, Any], pipeline: Any, accepted: Mapping[str, Any], family: Family
) -> dict[str, Any]:
    """Arguments of ``pipeline.__call__``, without condition, pictures and generator.

    Args:
        params: the request's complete parameters.
        pipeline: the stock pipeline.
        accepted: parameters of its ``__call__`` by name.
        family: its family.

    Raises:
        InvalidRequest: listing each parameter that the pipeline does not take as given.
    """
    given = {n: params[n] for n in PASSED_ON if params.get(n) is not None}
    given |= family.guidance(params, pipeline.transformer.config)
    faults = {}
    for name in given:
        if name not in accepted:
            takes = [n for n in (*PASSED_ON, "guidance_scale", "true_cfg_scale") if n in accepted]
            hint = "needs an input picture; " if name == "strength" else ""
            faults[name] = f"{hint}{type(pipeline).__name__} takes: {', '.join(takes)}"
    if "guidance_scale_2" in given and not pipeline.config.get("boundary_ratio"):
        faults["guidance_scale_2"] = "this model has no second transformer in use"
    multiple = family.size_multiple(pipeline)
    for name in ("height", "width"):
        if name in given and given[name] % multiple:
            lower = given[name] // multiple * multiple
            near = [str(n) for n in (lower, lower + multiple) if n]
            faults[name] = (
                f"must be a multiple of {multiple} for this model, for example "
                f"{' or '.join(near)}; got {given[name]}"
            )
    ratio = getattr(pipeline, "vae_scale_factor_temporal", None)
    if ratio and "num_frames" in given and given["num_frames"] % ratio != 1 % ratio:
        near_frames = given["num_frames"] // ratio * ratio + 1
        faults["num_frames"] = (
            f"must be 1 more than a multiple of {ratio} for this model, for example "
            f"{near_frames}; got {given['num_frames']}"
        )
    if (
        "sigmas" in given
        and "sigmas" not in faults
        and given.setdefault("num_inference_steps", len(given["sigmas"])) != len(given["sigmas"])
    ):
        faults["sigmas"] = (
            f"must have as many entries as num_inference_steps ({given['num_inference_steps']}), "
            f"has {len(given['sigmas'])}"
        )
    refuse(faults)
    return given


def refuse(faults: Mapping[str, str]) -> None:
    """Raise for faulty parameters, if there are any.

    Raises:
        InvalidRequest: with one field for each.
    """
    if faults:
        fields = [{"field": f"parameters.{n}", "message": m} for n, m in faults.items()]
        first = fields[0]
        raise InvalidRequest(f"{first['field']}: {first['message']}", fields=fields)


def _euler(config: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler  # noqa: PLC0415 - slow import

    return FlowMatchEulerDiscreteScheduler.from_config(config)


def _heun(config: Any) -> Any:
    from diffusers import FlowMatchHeunDiscreteScheduler  # noqa: PLC0415 - slow import

    return FlowMatchHeunDiscreteScheduler.from_config(config)


def _unipc(config: Any) -> Any:
    from diffusers import UniPCMultistepScheduler  # noqa: PLC0415 - slow import

    return UniPCMultistepScheduler.from_config(config, **_flow(config))


def _dpmpp(config: Any) -> Any:
    from diffusers import DPMSolverMultistepScheduler  # noqa: PLC0415 - slow import

    return DPMSolverMultistepScheduler.from_config(config, **_flow(config))


def _flow(config: Any) -> dict[str, Any]:
    shift = config.get("flow_shift", config.get("shift", 1.0))
    return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "euler": _euler,
    "heun": _heun,
    "unipc": _unipc,
    "dpmpp": _dpmpp,
}


def named_scheduler(name: str | None, own: Any) -> Any:
    """The diffusion scheduler of that name with the settings of the model's ``own``.

    Raises:
        InvalidRequest: no such scheduler, or it does not fit the model.
    """
    if name is None:
        return own
    if name not in SCHEDULERS:
        refuse({"scheduler": f"must be one of {', '.join(SCHEDULERS)}; got {name!r}"})
    if not _is_flow(own):
        refuse({"scheduler": f"this model's is {type(own).__name__}, which has no substitute"})
    return SCHEDULERS[name](own.config)


def _is_flow(scheduler: Any) -> bool:
    config = scheduler.config
    return type(scheduler).__name__.startswith("FlowMatch") or bool(config.get("use_flow_sigmas"))
