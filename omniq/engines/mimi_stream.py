"""Decoding a Mimi codec's frames as they come: every piece is what the whole would have had there.

Everything in Mimi's decoder is causal (Défossez et al. 2024, "Moshi", section 3.3). Its transformer
goes on from its keys and values; transformers' ``MimiModel.decode`` takes those, but begins its
convolutions anew with zeros at each call. Here they see as many positions before a piece as they
can look back over, and what belongs to those is cut off again.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from omniq.errors import InvalidRequest


class MimiStream:
    """The state of one waveform.

    Args:
        codec: a ``MimiModel``; several streams share it.

    Attributes:
        frames: decoded so far.
    """

    def __init__(self, codec: Any) -> None:
        from transformers import DynamicCache  # noqa: PLC0415 - slow import, done with the codec

        self._codec = codec
        self._past = DynamicCache(config=codec.config)
        self._look_back = receptive_positions(codec.decoder)
        self._last: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        self.frames = 0

    @torch.no_grad()
    def push(self, codes: torch.Tensor) -> torch.Tensor:
        """The samples of the next frames.

        Args:
            codes: int64 [frames, codebooks], at least one frame.

        Returns:
            float [channels, frames * samples of a frame] in the codec's dtype, on its device.

        Raises:
            InvalidRequest: a code is outside of its codebook, or there are too many codebooks.
        """
        check_codes(codes, self._codec.config)
        codec = self._codec
        quantized = codec.quantizer.decode(codes.T.unsqueeze(0).to(codec.device))
        positions = self._upsampled(quantized)
        made = codec.decoder_transformer(
            positions.transpose(1, 2), past_key_values=self._past, use_cache=True, return_dict=True
        )
        hidden = made.last_hidden_state.transpose(1, 2)
        seen = hidden if self._before is None else torch.cat([self._before, hidden], dim=2)
        samples = codec.decoder(seen)
        of_position = samples.shape[2] // seen.shape[2]
        self._before = seen[:, :, -self._look_back :] if self._look_back else None
        self.frames += len(codes)
        new: torch.Tensor = samples[0, :, -hidden.shape[2] * of_position :]
        return new

    def _upsampled(self, quantized: torch.Tensor) -> torch.Tensor:
        """[1, hidden, positions]: frames at the transformer's rate; each looks back at one."""
        if self._codec.upsample is None:
            return quantized
        seen = quantized if self._last is None else torch.cat([self._last, quantized], dim=2)
        made: torch.Tensor = self._codec.upsample(seen)
        self._last = quantized[:, :, -1:]
        return made[:, :, -(made.shape[2] // seen.shape[2]) * quantized.shape[2] :]


def receptive_positions(decoder: Any) -> int:
    """How many positions before one of its own a convolutional decoder looks at (``MimiDecoder``).

    Counted backwards from the samples: a convolution looks at (kernel - 1) * dilation values before
    the first; a transposed one that doubles its stride as kernel, at one more than these stand for.
    """
    back = 0
    for layer in reversed(decoder.layers):
        if hasattr(layer, "block"):
            back += sum(_before(inner) for inner in layer.block)
        elif isinstance(conv := getattr(layer, "conv", None), torch.nn.ConvTranspose1d):
            stride, kernel = conv.stride[0], conv.kernel_size[0]
            back = math.ceil(back / stride) + math.ceil((kernel - stride) / stride)
        else:
            back += _before(layer)
    return back


def _before(layer: Any) -> int:
    conv = getattr(layer, "conv", None)
    if not isinstance(conv, torch.nn.Conv1d):
        return 0
    return int((conv.kernel_size[0] - 1) * conv.dilation[0])


def check_codes(codes: torch.Tensor, config: Any) -> None:
    """Refuse what the codec cannot decode.

    Raises:
        InvalidRequest: no integers [frames, codebooks] within the codebooks of ``config``.
    """
    most, size = int(config.num_quantizers), int(config.codebook_size)
    if codes.ndim != 2 or codes.is_floating_point() or 0 in codes.shape or codes.shape[1] > most:
        raise InvalidRequest(
            f"stage input 'codes': must be integers [frames, 1 to {most} codebooks], is "
            f"{codes.dtype} {list(codes.shape)}"
        )
    if not 0 <= int(codes.min()) <= int(codes.max()) < size:
        raise InvalidRequest(
            f"stage input 'codes': codes must be 0 to {size - 1}, are {int(codes.min())} to "
            f"{int(codes.max())}"
        )
