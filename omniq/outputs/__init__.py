"""From what a stage made to what a client gets: inline values and encoded artifacts."""

from omniq.outputs.base import EncodedArtifact, OutputContext, OutputHandler, ProcessedOutput
from omniq.outputs.processor import MultimodalOutputProcessor

__all__ = [
    "EncodedArtifact",
    "MultimodalOutputProcessor",
    "OutputContext",
    "OutputHandler",
    "ProcessedOutput",
]
