"""Pictures and tensors among a request's inputs: from what a client gives to blobs for stages."""

from omniq.inputs.files import FETCH, InputFile, read_inputs, read_transparency
from omniq.inputs.sources import ArtifactId

__all__ = ["FETCH", "ArtifactId", "InputFile", "read_inputs", "read_transparency"]
