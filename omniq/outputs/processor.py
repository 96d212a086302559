"""Choosing the handler of an output type; third parties add types by entry points."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from omniq.config import OutputConfig
from omniq.config.pipeline import OUTPUT_HANDLERS
from omniq.errors import ConfigError
from omniq.outputs.audio import AudioHandler
from omniq.outputs.base import OutputContext, OutputHandler, ProcessedOutput
from omniq.outputs.image import ImageHandler
from omniq.outputs.json import JSONHandler
from omniq.outputs.pooling import PoolingHandler
from omniq.outputs.tensors import TensorsHandler
from omniq.outputs.text import TextHandler, TextImageHandler
from omniq.outputs.video import VideoHandler

BUILTIN: dict[str, type[OutputHandler]] = {
    "text": TextHandler,
    "image": ImageHandler,
    "text+image": TextImageHandler,
    "audio": AudioHandler,
    "video": VideoHandler,
    "latents": TensorsHandler,
    "hidden_states": TensorsHandler,
    "pooling": PoolingHandler,
    "json": JSONHandler,
}


class MultimodalOutputProcessor:
    """Turns stage outputs into values and files, one handler for each output type.

    Built-in types come first; an entry point in the group ``omniq.outputs``
    (``mesh = package.module:Handler``) adds a type that omniq lacks.

    Raises:
        ConfigError: an entry point's object is no :class:`OutputHandler` class.
    """

    def __init__(self) -> None:
        self._handlers = {name: handler() for name, handler in BUILTIN.items()}
        for point in entry_points(group=OUTPUT_HANDLERS):
            if point.name in self._handlers:
                continue
            handler = point.load()
            if not (isinstance(handler, type) and issubclass(handler, OutputHandler)):
                raise ConfigError(f"entry point {point.name!r}: {point.value} is no OutputHandler")
            self._handlers[point.name] = handler()

    @property
    def types(self) -> list[str]:
        """Output types that can be processed."""
        return sorted(self._handlers)

    def check(self, name: str, config: OutputConfig) -> None:
        """Whether output ``name`` can be processed as configured.

        Raises:
            ConfigError: unknown type or format; the message lists those there are.
        """
        self._handler(name, config).format_of(name, config)

    def formats_of(self, config: OutputConfig) -> tuple[str, ...]:
        """What ``config`` may name as its format.

        Raises:
            ConfigError: unknown type.
        """
        return self._handler("", config).formats

    def process(
        self, name: str, config: OutputConfig, data: Any, context: OutputContext
    ) -> ProcessedOutput:
        """Encode one pipeline output.

        Args:
            name: its name in the pipeline; the artifact gets the same.
            config: its type and format.
            data: the stage output: an entry of ``StageOutput.values``, or of
                ``StageOutput.tensors`` (names to tensors).
            context: job, prompt and parameters, for the file's metadata.

        Raises:
            ConfigError: as :meth:`check`.
            OutputError: ``data`` is not what the type demands.
        """
        handler = self._handler(name, config)
        context = replace(context, sample_rate=config.sample_rate)
        return handler.encode(name, handler.format_of(name, config), data, context)

    def piece(
        self, name: str, config: OutputConfig, data: Any, context: OutputContext
    ) -> ProcessedOutput:
        """Encode one chunk of a pipeline output that is streamed. As :meth:`process`."""
        handler = self._handler(name, config)
        context = replace(context, sample_rate=config.sample_rate)
        return handler.piece(name, handler.format_of(name, config), data, context)

    def _handler(self, name: str, config: OutputConfig) -> OutputHandler:
        try:
            return self._handlers[str(config.type)]
        except KeyError:
            raise ConfigError(
                f"output {name!r}: no handler for type {str(config.type)!r}; "
                f"allowed: {', '.join(self.types)}"
            ) from None
