"""A request's inputs that are files: read, checked and ready to be stored as blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omniq.config.pipeline import InputConfig, PipelineConfig
from omniq.errors import ArtifactNotFound, InputTooLarge, JobNotFound
from omniq.inputs.conversations import with_files
from omniq.inputs.faults import invalid, too_large
from omniq.inputs.pictures import pixels_of, transparency_of
from omniq.inputs.remote import fetch_remote
from omniq.inputs.sounds import samples_of
from omniq.inputs.sources import ArtifactId, RemoteFile, source_of
from omniq.inputs.tensors import tensor_file
from omniq.inputs.videos import file_of, frames_of
from omniq.settings import get_settings

#: Bytes of a result file by job id and name; InputTooLarge instead of reading too many.
FETCH = Callable[[str, str], Awaitable[bytes]]
#: Bytes of a blob that are left for its header.
_HEADER = 4096


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input, read: a blob for the stages, and what the job's record shows of it.

    ``data`` is a safetensors file: one tensor for each file that the client gave, in order of their
    names. Pictures are uint8 [H, W, 3], sound is float32 [samples] (mono, at the input's
    ``sample_rate``), videos are uint8 [frames, H, W, 3] or, ``as_file``, uint8 [bytes].
    """

    data: bytes = field(repr=False)
    shown: Any


async def read_inputs(
    pipeline: PipelineConfig, inputs: Mapping[str, Any], fetch: FETCH, *, local: bool = False
) -> dict[str, Any]:
    """``inputs`` with every file as an :class:`InputFile`; those read already stay. In messages,
    remote files and results of other jobs have become data URLs.

    Decoding happens in threads.

    Args:
        pipeline: whose inputs they are; their outer form is valid.
        inputs: as the client gave them.
        fetch: reads result files of other jobs.
        local: whether the client runs in this process, and may name paths.

    Raises:
        InvalidRequest: or its subclasses InputTooLarge and UnsupportedInput, naming the input.
    """
    found = dict(inputs)
    for name in pipeline.files:
        if name in inputs and not isinstance(inputs[name], InputFile):
            found[name] = await _read(name, pipeline.inputs[name], inputs[name], fetch, local)
    for name, spec in pipeline.inputs.items():
        if spec.type == "messages" and name in inputs:
            where = f"input.{name}"
            read = partial(_file_at, where=where, fetch=fetch)
            found[name] = await with_files(inputs[name], where, read)
    return found


async def read_transparency(pipeline: PipelineConfig, name: str, data: bytes) -> InputFile:
    """A mask from the file of a picture: white where that is wholly transparent, else black.

    Args:
        pipeline: has an input ``name`` of type image.
        name: of the input that the mask is for.
        data: PNG or WebP.

    Raises:
        InvalidRequest: or its subclasses, naming the input; also a picture without transparency.
    """
    field = f"input.{name}"
    source = source_of(data, field, local=False)
    most = pipeline.inputs[name].max_pixels
    mask = await asyncio.to_thread(transparency_of, source, field, most)
    return await asyncio.to_thread(_pictures, pipeline.inputs[name], [mask], [field])


async def _read(name: str, spec: InputConfig, value: Any, fetch: FETCH, local: bool) -> InputFile:
    several = isinstance(value, list | tuple)
    given = value if several else [value]
    fields = [f"input.{name}.{i}" if several else f"input.{name}" for i in range(len(given))]
    sources = [
        await _fetched(await asyncio.to_thread(source_of, item, where, local=local), where, fetch)
        for item, where in zip(given, fields, strict=True)
    ]
    return await asyncio.to_thread(_MAKE[spec.type], spec, sources, fields)


async def _file_at(url: str, where: str, fetch: FETCH) -> bytes:
    data: bytes = await _fetched(source_of(url, where, local=False), where, fetch)
    return data


async def _fetched(source: Any, where: str, fetch: FETCH) -> Any:
    if isinstance(source, RemoteFile):
        return await fetch_remote(source.url, where)
    if not isinstance(source, ArtifactId):
        return source
    try:
        data = await fetch(source.job, source.artifact)
    except (JobNotFound, ArtifactNotFound) as exc:
        raise invalid(where, exc.message) from exc
    except InputTooLarge as exc:
        raise too_large(where, exc.message) from exc
    return source_of(data, where, local=False)


def _pictures(spec: InputConfig, sources: list[Any], fields: list[str]) -> InputFile:
    def picture(source: Any, where: str, left: int) -> tuple[Any, dict[str, Any]]:
        pixels = pixels_of(source, where, spec.max_pixels)
        return pixels, {"width": pixels.shape[1], "height": pixels.shape[0]}

    return _arrays(picture, sources, fields)


def _sounds(spec: InputConfig, sources: list[Any], fields: list[str]) -> InputFile:
    def sound(source: Any, where: str, left: int) -> tuple[Any, dict[str, Any]]:
        samples = samples_of(source, where, spec.sample_rate, spec.max_seconds)
        return samples, {"sample_rate": spec.sample_rate, "samples": len(samples)}

    return _arrays(sound, sources, fields)


def _videos(spec: InputConfig, sources: list[Any], fields: list[str]) -> InputFile:
    if spec.as_file:
        return _arrays(lambda source, where, _: file_of(source, where, spec), sources, fields)

    def video(source: Any, where: str, left: int) -> tuple[Any, dict[str, Any]]:
        frames, fps = frames_of(source, where, spec, left)
        count, height, width = frames.shape[:3]
        return frames, {"width": width, "height": height, "frames": count, "fps": fps}

    return _arrays(video, sources, fields)


def _arrays(
    read: Callable[[Any, str, int], tuple[Any, dict[str, Any]]],
    sources: list[Any],
    fields: list[str],
) -> InputFile:
    """``read`` makes of one file, given its field and the bytes left, an array and what is shown
    of it.
    """
    import numpy as np  # noqa: PLC0415 - few requests need it
    from safetensors.numpy import save  # noqa: PLC0415 - as above

    arrays, shown, nbytes = {}, [], 0
    for i, (source, where) in enumerate(zip(sources, fields, strict=True)):
        array, facts = read(source, where, _most_bytes() - nbytes)
        nbytes += array.nbytes
        _check_blob(nbytes, where)
        # safetensors writes the memory as it lies, whatever the strides.
        arrays[f"{i:04d}"] = np.ascontiguousarray(array)
        shown.append(facts)
    return InputFile(bytes(save(arrays)), shown)


def _latents(spec: InputConfig, sources: list[Any], fields: list[str]) -> InputFile:
    made = tensor_file(sources[0], fields[0])
    _check_blob(len(made.data), fields[0])
    return InputFile(made.data, {"dtype": made.dtype, "shape": made.shape})


def _check_blob(nbytes: int, field: str) -> None:
    """Small files may hold much; what all of an input's hold must be storable."""
    most = _most_bytes()
    if nbytes > most:
        raise too_large(
            field, f"has {nbytes} bytes decoded, with those before it; {most} are allowed"
        )


def _most_bytes() -> int:
    return get_settings().redis_blob_max_bytes - _HEADER


_MAKE = {"image": _pictures, "audio": _sounds, "video": _videos, "latents": _latents}
