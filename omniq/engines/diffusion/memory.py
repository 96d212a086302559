"""Where a stage's weights are: on its device, there piece by piece, or asleep on the CPU."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import convert_file_size_to_int, send_to_device
from pydantic import Field, ValidationError, field_validator, model_validator

from omniq.config import OmniStageConfig
from omniq.config.stage import ConfigModel
from omniq.engines.faults import engine_faults
from omniq.errors import ConfigError

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
_HOOK = "group_offloading"


class GroupOffload(ConfigModel):
    """Arguments of diffusers' ``enable_group_offload``, by its names."""

    offload_type: Literal["block_level", "leaf_level"] = "leaf_level"
    num_blocks_per_group: int | None = Field(None, ge=1)
    non_blocking: bool = False
    use_stream: bool = False
    record_stream: bool = False
    low_cpu_mem_usage: bool = False
    offload_to_disk_path: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> GroupOffload:
        if self.offload_type == "block_level" and self.num_blocks_per_group is None:
            raise ValueError("offload_type block_level needs num_blocks_per_group")
        if self.record_stream and not self.use_stream:
            raise ValueError("record_stream needs use_stream")
        return self


class MemoryArgs(ConfigModel):
    """Engine arguments of every diffusion stage that say how much of a device it takes.

    ``enable_group_offload: true`` takes all its defaults. ``max_memory`` is in bytes; a text like
    ``20GiB`` or ``500MB`` is read as accelerate reads it.
    """

    enable_group_offload: GroupOffload | None = None
    enable_model_cpu_offload: bool = False
    max_memory: int | None = Field(None, ge=1)
    sleep_after: float | None = Field(None, gt=0, description="Seconds without a request.")

    @field_validator("enable_group_offload", mode="before")
    @classmethod
    def _switched(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @field_validator("max_memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return convert_file_size_to_int(value)
        except ValueError as exc:
            raise ValueError("must be bytes, or a text such as 20GiB or 500MB") from exc

    @model_validator(mode="after")
    def _one_way(self) -> MemoryArgs:
        if self.enable_group_offload and self.enable_model_cpu_offload:
            raise ValueError("enable_group_offload and enable_model_cpu_offload exclude each other")
        if self.enable_group_offload and self.sleep_after is not None:
            raise ValueError(
                "sleep_after has nothing to do beside enable_group_offload, "
                "whose weights rest on the CPU between forwards anyway"
            )
        return self

    @classmethod
    def of(cls, stage: OmniStageConfig) -> MemoryArgs:
        """From the stage's engine arguments; others are left alone.

        Raises:
            ConfigError: naming the argument, and what is allowed.
        """
        given = {n: v for n, v in stage.engine_args.items() if n in cls.model_fields}
        try:
            return cls.model_validate(given)
        except ValidationError as exc:
            fault = exc.errors()[0]
            where = "".join(f"{part}: " for part in fault["loc"])
            raise ConfigError(
                f"stage {stage.stage_id!r}: engine_args {where}{fault['msg']}"
            ) from exc


#: Names that each part adds to the engine arguments it takes.
MEMORY_ARGS = frozenset(MemoryArgs.model_fields)


class Weights:
    """A part's modules and where their weights are; all methods run on the model thread.

    Built with modules that are still on the CPU, so that a budget that is too small is reported
    before the device is touched.

    Args:
        stage: for its engine arguments (:class:`MemoryArgs`) and in errors.
        device: torch device of the stage.
        modules: by component name.
        in_blocks: names of those whose forward is the whole of their work, so that diffusers'
            ``block_level`` fits; the others are offloaded leaf by leaf.

    Raises:
        ConfigError: an argument is wrong, or the weights do not fit.
    """

    def __init__(
        self,
        stage: OmniStageConfig,
        device: str,
        modules: Mapping[str, torch.nn.Module],
        in_blocks: Iterable[str] = (),
    ) -> None:
        self._stage, self._device = stage, torch.device(device)
        self._modules, self._in_blocks = dict(modules), frozenset(in_blocks)
        self._args = MemoryArgs.of(stage)
        self._folders: list[tempfile.TemporaryDirectory[str]] = []
        self._one: _OneAtATime | None = None
        self._bounded = False
        self.asleep = False
        #: Bytes of all weights, and the most of them that are on the device at once.
        self.bytes = sum(map(_size, self._modules.values()))
        self.most_bytes = self.bytes
        self._place()

    @property
    def sleep_after(self) -> float | None:
        """Seconds without a request after which the stage sleeps; None: it never does."""
        return self._args.sleep_after

    def sleep(self) -> None:
        """Move what is on the device to the CPU, and give the device's memory back.

        Raises:
            EngineOutOfMemory: the machine's memory has no room; the weights stay where they are.
        """
        with engine_faults(f"stage {self._stage.stage_id!r} going to sleep"):
            if self._one is not None:
                self._one.release()
            else:
                self._move(CPU, back=self._device)
            _empty_cache(self._device)
        self.asleep = True

    def wake(self) -> None:
        """Undo :meth:`sleep`.

        Raises:
            EngineOutOfMemory: the device has no room now; the weights stay on the CPU.
        """
        with engine_faults(f"stage {self._stage.stage_id!r} waking up"):
            # Offloaded one at a time, they come when they are called.
            if self._one is None:
                self._move(self._device, back=CPU)
        self.asleep = False

    def close(self) -> None:
        """Remove what was offloaded to a disk, and the bound; the modules are used no more."""
        if self._bounded:
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)
        for folder in self._folders:
            folder.cleanup()
        self._folders = []

    def _place(self) -> None:
        group = self._args.enable_group_offload
        if group is not None:
            self._offload_groups(group)
        elif self._args.enable_model_cpu_offload:
            self.most_bytes = max(map(_size, self._modules.values()), default=0)
        self._check_room()
        if self._args.enable_model_cpu_offload:
            self._one = _OneAtATime(self._device)
            for module in self._modules.values():
                add_hook_to_module(module, self._one)
        elif group is None:
            with engine_faults(f"loading {self._stage.model}"):
                self._move(self._device, back=CPU)

    def _move(self, device: torch.device, *, back: torch.device) -> None:
        """All or nothing: ``back`` is where they go again if one does not fit."""
        try:
            for module in self._modules.values():
                module.to(device)
        except Exception:
            for module in self._modules.values():
                module.to(back)
            _empty_cache(self._device)
            raise

    def _offload_groups(self, config: GroupOffload) -> None:
        from diffusers.hooks import apply_group_offloading  # noqa: PLC0415 - slow import

        self.most_bytes = 0
        for name, module in self._modules.items():
            options = config.model_dump()
            if name not in self._in_blocks:
                options |= {"offload_type": "leaf_level", "num_blocks_per_group": None}
            if config.offload_to_disk_path is not None:
                # diffusers takes files that lie there for its own, whatever model wrote them.
                folder = tempfile.TemporaryDirectory(
                    prefix=f"{self._stage.stage_id}-{name}-", dir=config.offload_to_disk_path
                )
                self._folders.append(folder)
                options["offload_to_disk_path"] = folder.name
            try:
                apply_group_offloading(module, self._device, CPU, **options)
            except ValueError as exc:
                raise ConfigError(
                    f"stage {self._stage.stage_id!r}: engine_args enable_group_offload: {exc}"
                ) from exc
            # One component works at a time.
            held = _most_onloaded(module, ahead=config.use_stream)
            self.most_bytes = max(self.most_bytes, held)

    def _check_room(self) -> None:
        """Raises ConfigError if the weights fit neither the budget nor the device."""
        budget = self._args.max_memory
        where = f"stage {self._stage.stage_id!r}: its weights need {_gib(self.most_bytes)}"
        hint = (
            "engine_args enable_model_cpu_offload or enable_group_offload keep fewer weights on "
            "the device at once"
        )
        if budget is not None and self.most_bytes > budget:
            raise ConfigError(
                f"{where} on {self._device}, its max_memory is {_gib(budget)}", hint=hint
            )
        if self._device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self._device)
        if self.most_bytes > free:
            raise ConfigError(
                f"{where}, {self._device} has {_gib(free)} of {_gib(total)} free", hint=hint
            )
        if budget is not None and budget < total:
            # Beyond it torch reports that memory ran out, and forwards are split as ever.
            torch.cuda.set_per_process_memory_fraction(budget / total, self._device)
            self._bounded = True


class _OneAtATime(ModelHook):
    """Brings the module that is about to work to the device, and the one before it back.

    diffusers' own chain of hooks is undone at the end of every pipeline call; here calls of several
    requests take turns, so whoever works next decides.
    """

    def __init__(self, device: torch.device) -> None:
        #: Pipelines read it to know where their tensors belong.
        self.execution_device = device
        self.resident: torch.nn.Module | None = None
        #: Modules brought to the device since the start.
        self.moves = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Make ``module`` the resident one."""
        if self.resident is not module:
            self.release()
            module.to(self.execution_device)
            self.resident = module
            self.moves += 1
        return send_to_device(args, self.execution_device), send_to_device(
            kwargs, self.execution_device
        )

    def release(self) -> None:
        """Leave the device empty."""
        if self.resident is not None:
            self.resident.to(CPU)
            self.resident = None


def component_modules(pipeline: Any) -> dict[str, torch.nn.Module]:
    """A pipeline's components that have weights, by name."""
    return {n: m for n, m in pipeline.components.items() if isinstance(m, torch.nn.Module)}


def _tensors(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def _size(module: torch.nn.Module) -> int:
    return _bytes_of(_tensors(module))


def _most_onloaded(module: torch.nn.Module, *, ahead: bool) -> int:
    """Bytes of ``module`` that group offloading has on the device at once, at most.

    Groups of a module around others stay while those work; of the others it is the largest one,
    and with a stream the next beside it.
    """
    around, inner = 0, [0]
    seen: set[int] = set()
    for sub in module.modules():
        hook = _group_hook(sub)
        if hook is None or id(hook.group) in seen:
            continue
        seen.add(id(hook.group))
        group = hook.group
        tensors = [t for m in group.modules for t in _tensors(m)]
        size = _bytes_of([*tensors, *group.parameters, *group.buffers])
        leader = group.offload_leader
        if any(_group_hook(m) is not None for m in leader.modules() if m is not leader):
            around += size
        else:
            inner.append(size)
    return around + sum(sorted(inner)[-2:] if ahead else [max(inner)])


def _group_hook(module: torch.nn.Module) -> Any:
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(_HOOK)


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"
