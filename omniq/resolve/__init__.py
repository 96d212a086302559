"""Which pipeline serves a model: its family, found by what its configuration files say."""

from omniq.resolve.base import BuildOptions, ModelFamily
from omniq.resolve.files import ModelFiles
from omniq.resolve.registry import families, pipeline_for

__all__ = ["BuildOptions", "ModelFamily", "ModelFiles", "families", "pipeline_for"]
