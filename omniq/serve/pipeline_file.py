"""The file of a server's pipeline, which its processes read: ``serve/NAME.yaml`` in OMNIQ_DATA_DIR.

Queues and the file have the pipeline's name, so servers of different pipelines must differ in it:
they would run each other's jobs, and workers that start anew would read the other's file. A server
holds its file as long as it runs; the lock ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

import yaml

from omniq.config import PipelineConfig
from omniq.config.loader import available_pipelines, load_pipeline
from omniq.errors import ConfigError
from omniq.serve.target import numbered
from omniq.settings import get_settings


@dataclass(frozen=True)
class PipelineFile:
    """A written file, held until it is closed or this process ends."""

    path: Path
    _lock: IO[str]

    def close(self) -> None:
        """Others may write it now."""
        self._lock.close()


def held(pipeline: PipelineConfig) -> tuple[PipelineConfig, PipelineFile | None]:
    """``pipeline``, or ``NAME-2`` and so on where the name is taken, and its file; None: it is a
    known pipeline, which needs none.

    A name is another's while a server of another pipeline runs under it, and also when none does:
    who had it first keeps it as long as its model is there. A model's own file is written anew.
    Servers of the very same pipeline share it.

    Raises:
        ConfigError: OMNIQ_DATA_DIR cannot be written to.
    """
    known = available_pipelines()
    if known.get(pipeline.name) == pipeline:
        return pipeline, None
    folder = get_settings().data_dir.resolve() / "serve"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            named = numbered(pipeline, number)
            file = None if named.name in known else _hold(folder, named)
            if file is not None:
                return named, file
    except OSError as exc:
        raise ConfigError(f"cannot write to the data folder {folder}: {exc}") from exc
    raise AssertionError("numbers do not end")


def pipeline_yaml(pipeline: PipelineConfig) -> str:
    """A pipeline as a file that loads as the same pipeline."""
    data = pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return "# Written by `omniq serve`.\n" + yaml.safe_dump(data, sort_keys=False)


def _hold(folder: Path, pipeline: PipelineConfig) -> PipelineFile | None:
    """The file of that name, unless it is another's."""
    file = PipelineFile(
        folder / f"{pipeline.name}.yaml", (folder / f"{pipeline.name}.lock").open("w")
    )
    try:
        alone = True
        fcntl.flock(file._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        alone = False
        fcntl.flock(file._lock, fcntl.LOCK_SH)  # whoever writes it has done so then
    theirs = _read(file.path)
    if theirs != pipeline:
        if not alone or (theirs is not None and _is_anothers(theirs, pipeline)):
            file.close()
            return None
        new = file.path.with_suffix(".new")
        new.write_text(pipeline_yaml(pipeline), encoding="utf-8")
        new.replace(file.path)  # never half a file for who reads it now
    fcntl.flock(file._lock, fcntl.LOCK_SH)
    return file


def _read(file: Path) -> PipelineConfig | None:
    """None: there is none, or one of another version of omniq, which nothing can serve."""
    if not file.is_file():
        return None
    try:
        return load_pipeline(file)
    except ConfigError:
        return None


def _is_anothers(known: PipelineConfig, pipeline: PipelineConfig) -> bool:
    """Whether it is of models that are still there, all of them others than this one's."""
    theirs = {stage.model_path for stage in known.stages}
    ours = {stage.model_path for stage in pipeline.stages}
    return theirs.isdisjoint(ours) and not any(_is_gone(model) for model in theirs)


def _is_gone(model: str) -> bool:
    """Whether it is a folder, not a name on the hub, and is not there."""
    return Path(model).is_absolute() and not Path(model).exists()
