"""Chunks of the pipeline's outputs on their way to the client: ``stage.delta`` events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from omniq.config import OutputConfig
from omniq.jobs.model import ArtifactInfo
from omniq.jobs.store import JobStore
from omniq.outputs import MultimodalOutputProcessor, OutputContext
from omniq.outputs.base import OutputError
from omniq.streams import ChunkStreams, Refused
from omniq_workers.channel import Item
from omniq_workers.outage import through_outages

if TYPE_CHECKING:
    from omniq_workers.run import Run


class Pieces:
    """Sends chunks into the job's event stream, which is bounded and can be resumed; no client,
    however slow, holds up the engine.

    A chunk of tensors becomes an artifact ``<output>.<sequence>`` in the output's own format; one
    of sound is 16-bit PCM within the event (:func:`omniq.outputs.sound.pcm16_message`).
    """

    def __init__(
        self,
        outputs: dict[str, OutputConfig],
        *,
        streams: ChunkStreams,
        store: JobStore,
        processor: MultimodalOutputProcessor,
    ) -> None:
        self._streams, self._store, self._processor = streams, store, processor
        #: By the stage's name of the output: the pipeline's name, and how it is made.
        self.outputs = {o.source.partition(".")[2]: (name, o) for name, o in outputs.items()}

    async def send(self, run: Run, output: str, sequence: int, item: Item) -> None:
        """Emit chunk number ``sequence`` of a stage's output.

        Raises:
            Refused: the run is not wanted.
            OutputError: the tensors do not have the form that the output's type demands.
            InvalidRequest: an artifact is too large.
            BrokerUnavailable: for longer than an outage may last.
        """
        value, artifact = item.value, None
        if item.tensors:
            value, artifact = await self._encoded(run, output, sequence, item)
        delta: dict[str, Any] = {"output": output, "sequence": sequence, "value": value}
        if artifact is not None:
            delta["artifact"] = artifact.model_dump(mode="json")
        try:
            await through_outages(lambda: self._streams.piece(run.key, delta, artifact))
        except Refused:
            if artifact is not None:
                await through_outages(
                    lambda: self._store.drop_artifacts(run.job_id, [artifact.key])
                )
            raise

    async def _encoded(
        self, run: Run, output: str, sequence: int, item: Item
    ) -> tuple[Any, ArtifactInfo | None]:
        name, declared = self.outputs[output]
        config = declared.in_format(run.spec.formats.get(name))
        context = OutputContext.of_job(run.spec)
        done = await asyncio.to_thread(
            self._processor.piece, f"{name}.{sequence}", config, item.tensors, context
        )
        value = item.value if done.value is None else done.value
        if (file := done.artifact) is None:
            return value, None
        if done.more:
            raise OutputError(f"output {output!r}: a chunk is one file, not {1 + len(done.more)}")
        fence = run.grant.fence
        key = await through_outages(
            lambda: self._store.put_artifact(run.job_id, file.name, fence, file.data)
        )
        meta = {**file.meta, "sequence": sequence}
        return value, ArtifactInfo(
            name=file.name,
            content_type=file.content_type,
            nbytes=len(file.data),
            key=key,
            meta=meta,
        )
