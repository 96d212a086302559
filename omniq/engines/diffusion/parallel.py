"""How the devices of one DiT stage share its transformer's work: configuration and placement.

Ranks lie in a grid of ``cfg_degree`` x ``ring_degree`` x ``ulysses_degree``. A branch is the ranks
of one place in the first axis: it computes whole forwards, of which it splits the sequence by
diffusers' context parallelism. Two branches compute two forwards at a time, such as the conditional
and the unconditional one of a guided step.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field, ValidationError, model_validator

from omniq.config import OmniStageConfig
from omniq.config.stage import ConfigModel
from omniq.engines.diffusion.acceleration import ACCELERATION_ARGS
from omniq.engines.families.base import Family
from omniq.errors import ConfigError

logger = logging.getLogger(__name__)
ARGUMENT = "parallel"
#: Ring attention adds up parts by their logsumexp, which torch's usual attention does not give.
RING_BACKEND = "_native_cudnn"
AXES = ("cfg", "ring", "ulysses")


class Parallel(ConfigModel):
    """Engine argument ``parallel``.

    ``ring_degree``, ``ulysses_degree`` and the two ``_anything`` are those of diffusers'
    ``ContextParallelConfig``; the latter take sequences and numbers of heads that the degree does
    not divide. They are on by default, because prompts have any length, but diffusers has none of
    them for a ring of Ulysses groups. ``timeout`` is in seconds: how long a process waits for the
    others in one exchange, and for the end of their forwards.
    """

    cfg_degree: Literal[1, 2] = 1
    ring_degree: int = Field(1, ge=1)
    ulysses_degree: int = Field(1, ge=1)
    ring_anything: bool | None = None
    ulysses_anything: bool | None = None
    timeout: float = Field(120.0, gt=0)

    @model_validator(mode="after")
    def _possible(self) -> Parallel:
        if self.world == 1:
            raise ValueError("one of cfg_degree, ring_degree and ulysses_degree must be above 1")
        for name, other in (("ring", "ulysses"), ("ulysses", "ring")):
            if not getattr(self, f"{name}_anything"):
                continue
            if getattr(self, f"{name}_degree") == 1:
                raise ValueError(f"{name}_anything needs a {name}_degree above 1")
            if getattr(self, f"{other}_degree") > 1:
                raise ValueError(
                    f"{name}_anything does not go with a {other}_degree above 1 (diffusers)"
                )
        return self

    @classmethod
    def of(cls, stage: OmniStageConfig) -> Parallel | None:
        """From the stage's engine arguments; None: one device.

        Raises:
            ConfigError: it is wrong, or the stage asks for something that does not go with it.
        """
        if (given := stage.engine_args.get(ARGUMENT)) is None:
            return None
        where = f"stage {stage.stage_id!r}: engine_args {ARGUMENT}"
        try:
            made = cls.model_validate(given)
        except ValidationError as exc:
            fault = exc.errors()[0]
            place = "".join(f"{part}: " for part in fault["loc"])
            raise ConfigError(f"{where}: {place}{fault['msg']}") from exc
        # What changes weights or where they lie would have to happen on all ranks.
        names = ["enable_group_offload", "enable_model_cpu_offload", "sleep_after"]
        names += sorted(ACCELERATION_ARGS - {"attention_backend"})
        others = [n for n in names if stage.engine_args.get(n)]
        if stage.dit is not None:
            others += ["dit.loras"] if stage.dit.loras else []
            # Ranks that split a sequence see different parts, and would decide differently.
            others += ["dit.cache"] if made.splits and stage.dit.cache.method != "none" else []
        if others:
            raise ConfigError(f"{where} does not go with {', '.join(others)}")
        return made

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.cfg_degree * self.branch

    @property
    def branch(self) -> int:
        """Processes that compute one forward together."""
        return self.ring_degree * self.ulysses_degree

    @property
    def splits(self) -> bool:
        """Whether forwards are split along the sequence."""
        return self.branch > 1

    @property
    def context(self) -> dict[str, Any]:
        """Arguments of ``ContextParallelConfig``."""
        unified = self.ring_degree > 1 and self.ulysses_degree > 1
        made: dict[str, Any] = {}
        for name in ("ring", "ulysses"):
            degree, anything = getattr(self, f"{name}_degree"), getattr(self, f"{name}_anything")
            default = degree > 1 and not unified
            made |= {
                f"{name}_degree": degree,
                f"{name}_anything": default if anything is None else anything,
            }
        return made

    def check(
        self, stage: OmniStageConfig, device: str, models: Sequence[Any], family: Family
    ) -> None:
        """Whether these models can do it here.

        Raises:
            ConfigError: they cannot, or there are too few devices.
        """
        where = f"stage {stage.stage_id!r}: engine_args {ARGUMENT}"
        if self.cfg_degree > 1 and family.form is None:
            raise ConfigError(
                f"{where}: cfg_degree must be 1, omniq knows no guidance pairs of this pipeline"
            )
        if self.cfg_degree > 1 and models[0].config.get("guidance_embeds"):
            logger.info(
                "stage %s: guidance_scale is an input of this model and one forward a step; "
                "cfg_degree helps true_cfg_scale and requests that share forwards",
                stage.stage_id,
            )
        if family.form is not None and family.form.state:
            raise ConfigError(
                f"{where}: this pipeline keeps {', '.join(family.form.state)} from call to call, "
                "which the other devices would be without"
            )
        for model in models if self.splits else ():
            if getattr(model, "_cp_plan", None) is None:
                raise ConfigError(f"{where}: diffusers has no plan to split {type(model).__name__}")
            heads = model.config.get("num_attention_heads")
            if heads and heads % self.ulysses_degree and not self.context["ulysses_anything"]:
                raise ConfigError(
                    f"{where}: ulysses_degree {self.ulysses_degree} does not divide the model's "
                    f"{heads} attention heads",
                    hint="choose one that does, or ulysses_anything: true",
                )
            half = (torch.float16, torch.bfloat16)
            if self.ring_degree > 1 and device != "cpu" and model.dtype not in half:
                raise ConfigError(
                    f"{where}: ring_degree above 1 needs bfloat16 or float16 on a GPU, "
                    f"the model is {str(model.dtype).removeprefix('torch.')}"
                )
        there = torch.cuda.device_count()
        if device != "cpu" and there < self.world:
            raise ConfigError(
                f"{where}: needs {self.world} devices, this worker has {there}",
                hint="list as many in the stage's devices, or in --devices",
            )
        if dist.is_initialized():
            raise ConfigError(f"{where}: this process is in a process group of torch already")


def join_ranks(store: str, rank: int, config: Parallel, device: str) -> None:
    """Enter the process group; blocks until all ranks have."""
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=store,
        rank=rank,
        world_size=config.world,
        timeout=datetime.timedelta(seconds=config.timeout),
    )


def parallelize(models: Sequence[Any], config: Parallel, device: str, backend: Any = None) -> None:
    """What ``enable_parallelism`` does, which itself asks for an accelerator.

    ``backend``: the attention backend that the stage asks for, if it does.
    """
    if not config.splits:
        return
    from diffusers import ContextParallelConfig, ParallelConfig  # noqa: PLC0415 - slow import
    from diffusers.hooks import apply_context_parallel  # noqa: PLC0415
    from diffusers.models.attention_dispatch import AttentionBackendName  # noqa: PLC0415

    kind = torch.device(device).type
    sizes = (config.cfg_degree, config.ring_degree, config.ulysses_degree)
    mesh = dist.device_mesh.init_device_mesh(kind, sizes, mesh_dim_names=AXES)
    ring = config.ring_degree > 1
    if ring and kind == "cpu":
        _give_logsumexp_on_cpu()
    for model in models:
        own = ContextParallelConfig(mesh=mesh, **config.context)
        whole = ParallelConfig(context_parallel_config=own)
        whole.setup(dist.get_rank(), dist.get_world_size(), torch.device(device), mesh=mesh)
        model._parallel_config = whole
        for module in model.modules():
            processor: Any = getattr(module, "processor", None)
            if hasattr(processor, "_parallel_config"):
                processor._parallel_config = whole
                if ring and kind != "cpu" and backend is None:
                    processor._attention_backend = AttentionBackendName(RING_BACKEND)
        apply_context_parallel(model, own, model._cp_plan)


def _give_logsumexp_on_cpu() -> None:
    """Let diffusers' native attention return the logsumexp, which torch's CPU kernel computes.

    For this whole process: what it replaces fails when asked for one, and is otherwise kept.
    """
    from diffusers.models import attention_dispatch as dispatch  # noqa: PLC0415 - slow import

    native = dispatch._native_attention_forward_op
    if getattr(native, "gives_logsumexp", False):
        return

    def forward(ctx: Any, *given: Any, **more: Any) -> Any:
        """Query, key, value and output [B, S, H, D]; logsumexp [B, S, H]."""
        query, key, value, mask, dropout, causal, scale, _, return_lse = given
        if not return_lse:
            return native(ctx, *given, **more)
        heads_first = [x.transpose(1, 2).contiguous() for x in (query, key, value)]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, dropout, causal, attn_mask=mask, scale=scale
        )
        return out.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()

    forward.gives_logsumexp = True  # type: ignore[attr-defined]
    dispatch._native_attention_forward_op = forward
