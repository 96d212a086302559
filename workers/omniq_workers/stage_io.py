"""A stage's inputs and outputs: job record and blobs to the engine, and back again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from celery.utils.log import get_logger
from pydantic import TypeAdapter

from omniq.blobs.base import BlobRef
from omniq.blobs.choice import Where, where
from omniq.config import Modality, OutputConfig, PipelineConfig
from omniq.config.pipeline import REQUEST
from omniq.engines.base import StageInput, StageOutput
from omniq.errors import BlobError, BrokerUnavailable, EngineError
from omniq.jobs.edges import hosts_of
from omniq.jobs.model import ArtifactInfo, JobSpec, StageResult
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerRegistry
from omniq.outputs import MultimodalOutputProcessor, OutputContext

if TYPE_CHECKING:
    import torch

    from omniq.blobs import BlobRouter
    from omniq_workers.run import Run

logger = get_logger(__name__)

#: For so many seconds the registry's answer about consumers is good enough.
CONSUMERS_FRESH = 1.0
#: A blob of at most so many bytes is copied in shared memory before a thread would have started.
INLINE_BYTES = 4 << 20
#: Engines may give numbers of numpy's.
METRICS = TypeAdapter(dict[str, float | int])
#: Most blobs that the record is told of at once.
MOST_FREED = 1000


class StageIO:
    """Reads what the stages before left, writes what the stages behind and the client need.

    Blobs are copied in threads, except for small ones in shared memory: the loop goes on meanwhile.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        stage_id: str,
        *,
        router: BlobRouter,
        processor: MultimodalOutputProcessor,
        store: JobStore,
        registry: WorkerRegistry,
        host: str,
    ) -> None:
        self._pipeline, self._stage_id = pipeline, stage_id
        self._router, self._processor = router, processor
        self._store, self._registry, self.host = store, registry, host
        #: Whole inputs: name, the stage that makes it, and of which output. Others arrive by chunks
        #: (:mod:`omniq_workers.windows`).
        self._edges = [
            (e.target.partition(".")[2], e.producer, e.source.partition(".")[2])
            for e in pipeline.edges_into(stage_id)
            if e.trigger != "window"
        ]
        self._outputs = pipeline.outputs_of(stage_id)
        #: Outputs that stages behind read as a whole, with those stages; and all that are needed.
        self._passed_on: dict[str, set[str]] = {}
        for edge in pipeline.edges:
            if edge.producer == stage_id and edge.trigger == "full":
                self._passed_on.setdefault(edge.source.partition(".")[2], set()).add(edge.consumer)
        made = {o.source.partition(".")[2] for o in self._outputs.values()}
        self._needed = made.union(self._passed_on)
        #: Whether all live readers of an output live here, and until when that is taken for true.
        self._local: dict[str, bool] = {}
        self._local_until = 0.0
        #: What was freed here and is still on this host's garbage list.
        self._freed: list[str] = []
        #: Until then blobs are written in threads, because shared memory was full.
        self._threads_until = time.monotonic() if router.shm is not None else float("inf")

    # -- inputs ------------------------------------------------------------------------------

    async def inputs(
        self, spec: JobSpec, upstream: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, StageInput]:
        """Every whole input by its name; an optional input of the request may be missing.

        Raises:
            BlobError: a blob cannot be read.
            EngineError: a stage before did not make an output that an edge promises.
        """
        found: dict[str, StageInput] = {}
        blobs: dict[str, BlobRef] = {}
        for name, producer, output in self._edges:
            if producer == REQUEST:
                if output in spec.inputs:
                    found[name] = StageInput(value=spec.inputs[output])
                if output in spec.files:
                    blobs[name] = spec.files[output]
                continue
            made = upstream.get(producer, {}).get(output)
            if made is None:
                raise EngineError(f"stage {producer!r} made no output {output!r}")
            found[name] = StageInput(value=made.get("value"))
            if "blob" in made:
                blobs[name] = BlobRef.from_fields(made["blob"])
        if len(blobs) > 1:
            read = await asyncio.gather(*map(self.read, blobs.values()))
        else:
            read = [await self.read(ref) for ref in blobs.values()]
        for name, tensors in zip(blobs, read, strict=True):
            found[name] = StageInput(value=found[name].value, tensors=tensors)
        return found

    # -- outputs -----------------------------------------------------------------------------

    async def store(self, run: Run, output: StageOutput) -> StageResult:
        """Write what of ``output`` is used; ``run.blobs`` and ``run.files`` grow by it.

        Raises:
            EngineError: an output that an edge or the pipeline names was not made.
            OutputError: an output is not what its type demands.
            BlobError: a blob cannot be written.
            InvalidRequest: an artifact is too large.
        """
        for name in self._needed:
            if name not in output.values and name not in output.tensors:
                raise EngineError(f"the engine of stage {self._stage_id!r} made no output {name!r}")
        outputs: dict[str, dict[str, Any]] = {}
        for name, readers in sorted(self._passed_on.items()):
            if readers.isdisjoint(run.spec.stages):
                continue  # the job does without them
            made: dict[str, Any] = {}
            if name in output.values:
                made["value"] = output.values[name]
            if name in output.tensors:
                ref = await self.put(run, name, output.tensors[name])
                run.blobs.append(ref)
                made["blob"] = ref.to_fields()
            outputs[name] = made
        values, artifacts = await self._results(run, output)
        return StageResult(
            outputs=outputs,
            blobs=list(run.blobs),
            values=values,
            artifacts=artifacts,
            metrics=METRICS.validate_python(output.metrics) if output.metrics else {},
        )

    async def read(self, ref: BlobRef) -> dict[str, torch.Tensor]:
        """The tensors of one blob, read-only.

        Raises:
            BlobError: it cannot be read.
        """
        if ref.store == "shm" and ref.host == self.host and ref.nbytes <= INLINE_BYTES:
            return self._router.get(ref)
        return await asyncio.to_thread(self._router.get, ref)

    async def put(self, run: Run, name: str, tensors: Mapping[str, torch.Tensor]) -> BlobRef:
        """Write one blob for the stages behind; the caller sees to its end.

        ``name`` is the output's, for one of its chunks followed by a dot and a number.

        Raises:
            BlobError: it cannot be written.
        """
        blob_id = ".".join(map(str, (*run.key, name)))
        output, now = name.partition(".")[0], time.monotonic()
        local = self._local.get(output) if now < self._local_until else None
        if local is None:
            local = await self._consumers_local(output)
        if local and now > self._threads_until and _is_small(tensors):
            ref = self._router.put(blob_id, tensors, consumers_local=True)
            if ref.store != "shm":  # there is no room, and Redis is not for the loop to wait for
                self._threads_until = time.monotonic() + CONSUMERS_FRESH
            return ref
        return await asyncio.to_thread(self._router.put, blob_id, tensors, consumers_local=local)

    async def _consumers_local(self, output: str) -> bool:
        """Whether every live worker of every stage that reads the output runs on this machine."""
        workers = await self._registry.all(self._pipeline.name)
        if time.monotonic() > self._local_until:
            self._local.clear()
            self._local_until = time.monotonic() + CONSUMERS_FRESH
        readers = self._pipeline.readers_of(f"{self._stage_id}.{output}")
        found = where(self.host, (hosts_of(workers, stage) for stage in readers))
        self._local[output] = local = found is Where.SAME_HOST
        return local

    async def _results(
        self, run: Run, output: StageOutput
    ) -> tuple[dict[str, Any], dict[str, ArtifactInfo]]:
        """The pipeline outputs made from this stage, encoded and stored."""
        if not self._outputs:
            return {}, {}
        job_id, _, fence = run.key
        context = OutputContext.of_job(run.spec)
        values: dict[str, Any] = {}
        artifacts: dict[str, ArtifactInfo] = {}
        for name, declared in self._outputs.items():
            config = declared.in_format(run.spec.formats.get(name))
            source = config.source.partition(".")[2]
            data = _data_of(output, source, config)
            if config.type is Modality.TEXT:  # nothing to encode
                done = self._processor.process(name, config, data, context)
            else:
                done = await asyncio.to_thread(self._processor.process, name, config, data, context)
            if done.value is not None:
                values[name] = done.value
            for file in done.artifacts:
                key = await self._store.put_artifact(job_id, file.name, fence, file.data)
                run.files.append(key)
                artifacts[file.name] = ArtifactInfo(
                    name=file.name,
                    content_type=file.content_type,
                    nbytes=len(file.data),
                    key=key,
                    meta=file.meta,
                )
        return values, artifacts

    def free_here(self, garbage: Sequence[str]) -> None:
        """Free blobs in this host's shared memory that no job needs; the host's garbage list has
        them too, in case that it cannot be done now.
        """
        shm = self._router.shm
        if shm is None:
            return
        for entry in garbage:
            try:
                freed = shm.free(orjson.loads(entry)["place"])
            except BlobError as exc:
                logger.warning("a blob is left to the garbage collection: %s", exc)
            else:
                self._freed += [entry] if freed else []

    def take_freed(self) -> list[str]:
        """What :meth:`free_here` has freed since this was last called; for the garbage list."""
        freed, self._freed = self._freed[:MOST_FREED], self._freed[MOST_FREED:]
        return freed

    async def drop(self, run: Run) -> None:
        """Delete what a run has written that was not recorded, and will not be. What cannot be
        deleted now expires by itself.
        """
        await self.free(run.blobs)
        try:
            await self._store.drop_artifacts(run.job_id, run.files)
        except BrokerUnavailable as exc:
            logger.warning("result files of job %s are left to expire: %s", run.job_id, exc)

    async def free(self, blobs: Sequence[BlobRef]) -> None:
        """Delete blobs that nobody will read. What cannot be deleted now expires by itself."""
        for ref in blobs:
            try:
                await asyncio.to_thread(self._router.delete, ref)
            except (BlobError, BrokerUnavailable) as exc:
                logger.warning("blob %s is left to be swept or to expire: %s", ref.id, exc)


def _is_small(tensors: Mapping[str, torch.Tensor]) -> bool:
    return sum(t.nbytes for t in tensors.values()) <= INLINE_BYTES and all(
        t.device.type == "cpu" for t in tensors.values()
    )


def _data_of(output: StageOutput, source: str, config: OutputConfig) -> Any:
    """What the output processor gets: tensors, or a value, or both where the type is of both."""
    tensors, value = output.tensors.get(source), output.values.get(source)
    if config.type is Modality.TEXT_IMAGE and tensors is not None:
        return {"text": value, **tensors}
    return tensors if tensors is not None else value
