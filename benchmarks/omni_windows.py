"""How far speech decoded by windows is from the same speech decoded at once.

    python benchmarks/omni_windows.py --out omni_windows.json

token2wav of Qwen2.5-Omni and code2wav of Qwen3-Omni with the layers, attention and filters of the
published configurations, narrower, and with random weights: each matrix has the standard deviation
``gain`` / √inputs, so that a layer answers to all it sees. Compared is what a stream gives with the
engine's own code for windows: signal to noise (dB, higher is nearer) of sound and of token2wav's
spectrogram, the largest error as a share of the largest sample, and the mean distance of log
spectra (dB). ``work`` is how many frames are computed for each frame that is heard.

Qwen3-Omni's is also compared with ``chunked_decode`` of transformers, whose every chunk lacks its
last samples: what it has is compared where it belongs.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine, table, write_json

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from omni_stages import omni_stage
from tiny_qwen3_omni import make_qwen3_omni
from tiny_qwen_omni import make_qwen_omni

from omniq.engines import create_engine
from omniq.engines.base import StageRequest
from omniq.engines.omni.code2wav import FIRST_FRAMES
from omniq.engines.omni.token2wav import FIRST_BLOCKS
from omniq.engines.omni.windows import Sizes

CODES = 64
SEED = 11
#: Gain of the convolutions that make sound, and standard deviation of the sound.
CONVOLUTIONS, LOUD = 0.7, 0.15
QWEN2_5: dict[str, Any] = {
    "token2wav_config": {
        "dit_config": {
            "hidden_size": 64,
            "num_hidden_layers": 22,
            "num_attention_heads": 2,
            "head_dim": 32,
            "look_ahead_layers": [10],
            "look_backward_layers": [0, 20],
        },
        "bigvgan_config": {"upsample_initial_channel": 64},
    }
}
QWEN3: dict[str, Any] = {
    "code2wav_config": {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 72,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "decoder_dim": 32,
    }
}


@dataclass(frozen=True, slots=True)
class Distance:
    """Of a sound from the whole's."""

    snr_db: float | None
    largest: float
    spectra_db: float

    @classmethod
    def of(cls, sound: torch.Tensor, whole: torch.Tensor) -> Distance:
        """Both float32 [samples]."""
        error, spectra = sound - whole, _levels(sound) - _levels(whole)
        return cls(
            snr(sound, whole),
            float(error.abs().max() / whole.abs().max()),
            float(spectra.square().mean(0).sqrt().mean()),
        )

    def cells(self) -> list[str]:
        return [shown(self.snr_db), f"{100 * self.largest:.2f} %", f"{self.spectra_db:.2f}"]


def snr(made: torch.Tensor, whole: torch.Tensor) -> float | None:
    """dB; of both [n] or [n, channels], without what stays the same all along; None: all equal."""
    made, whole = made.double(), whole.double()
    power = float((made - whole).square().sum())
    signal = float((whole - whole.mean(0)).square().sum())
    return 10 * math.log10(signal / power) if power else None


def shown(decibel: float | None) -> str:
    return "equal" if decibel is None else f"{decibel:.1f}"


def _levels(sound: torch.Tensor) -> torch.Tensor:
    """dB [bins, times] of 43 ms each; 80 dB below the loudest is silence."""
    size, sound = 1024, sound.double()
    window = torch.hann_window(size, dtype=sound.dtype)
    made = torch.stft(sound, size, size // 4, window=window, return_complex=True).abs()
    return 20 * torch.log10(made.clamp_min(1e-4 * float(made.max())))


def reweigh(model: torch.nn.Module, gain: float) -> None:
    """Random matrices of standard deviation ``gain`` / √inputs; vectors stay."""
    torch.manual_seed(0)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.ndim > 1:
            inputs = 1 if isinstance(module, torch.nn.Embedding) else weight[0].numel()
            if isinstance(module, torch.nn.ConvTranspose1d):  # [in, out, kernel]
                inputs = weight.shape[0] * weight.shape[2] // module.stride[0]
            with torch.no_grad():
                weight.normal_(0, gain / math.sqrt(inputs))


def level(last: torch.nn.Module, sound: torch.Tensor) -> None:
    """Set the last layer so that what gave ``sound`` is as loud as speech, and nothing is cut."""
    with torch.no_grad():
        for weight in last.parameters():
            weight.mul_(LOUD / sound.std())


def decoded(
    engine: Any, codes: torch.Tensor, portion: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sound [samples], and the spectrogram [frames, mel] where there is one: streamed by so many
    codes at once, or as a whole.
    """
    request = StageRequest("one", {"seed": SEED}, stream=bool(portion))
    utterance, sounds = engine.utterance(request), []
    for part in codes.split(portion or len(codes)):
        utterance.push(part)
        if portion:
            sounds += utterance.sounds(ended=False)
    sounds += utterance.sounds(ended=True)
    return torch.cat(sounds), getattr(utterance, "_mel", None)


@asynccontextmanager
async def engine_of(folder: Path, stage: str, name: str) -> AsyncIterator[Any]:
    engine = create_engine(omni_stage(folder, stage, name))
    await engine.load()
    yield engine
    await engine.unload()


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, CODES, shape, generator=torch.Generator().manual_seed(3))


async def token2wav(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Qwen2.5-Omni: windows of blocks, alone and with what the vocoder adds."""
    found: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as name:
        folder = make_qwen_omni(Path(name) / "omni", QWEN2_5)
        async with engine_of(folder, "token2wav", "omni-token2wav") as engine:
            block, codes = int(engine._dit.block_size), random_codes(options.codes)
            for gain in options.gains:
                reweigh(engine._dit, gain)
                reweigh(engine._vocoder, CONVOLUTIONS)
                level(engine._vocoder.conv_post, decoded(engine, codes)[0])
                whole, whole_mel = decoded(engine, codes)
                for blocks, past, future, overlap in options.blocks:
                    engine.sizes = Sizes(
                        chunk=blocks * block,
                        past=past * block,
                        future=future * block,
                        overlap=overlap,
                        first=min(blocks, FIRST_BLOCKS) * block,
                    )
                    sound, mel = decoded(engine, codes, 12)
                    distance, mel_snr = Distance.of(sound, whole), snr(mel, whole_mel)
                    work = (blocks + past + future) / blocks
                    found.append(
                        {
                            "gain": gain,
                            "blocks": [blocks, past, future],
                            "overlap": overlap,
                            "work": work,
                            "mel_snr_db": mel_snr,
                            **asdict(distance),
                        }
                    )
                    sizes = f"{blocks}, {past} before, {future} behind, overlap {overlap}"
                    mel_cell = shown(mel_snr)
                    cells = [f"{gain:g}", sizes, f"{work:.1f}", mel_cell, *distance.cells()]
                    print(*cells, file=sys.stderr)
                    rows.append(cells)
    print("Qwen2.5-Omni, token2wav")
    header = ["gain", "blocks of a window", "work", "mel dB", "SNR dB", "largest", "spectra dB"]
    print(table(header, rows))
    return found


@torch.no_grad()
def chunked(engine: Any, codes: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``chunked_decode``, with the whole's samples where its chunks lack some."""
    made = engine._model.chunked_decode(codes.T[None]).reshape(-1).float()
    size, sound, at = 300 * engine.samples_a_frame, whole.clone(), 0
    lacks = len(codes) * engine.samples_a_frame - len(whole)
    for begin in range(0, len(codes) * engine.samples_a_frame, size):
        length = min(size, len(codes) * engine.samples_a_frame - begin) - lacks
        sound[begin : begin + length] = made[at : at + length]
        at += length
    assert at == len(made), "every chunk lacks as many samples"
    return sound


async def code2wav(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Qwen3-Omni: windows with so many frames before them."""
    found: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as made:
        folder = make_qwen3_omni(Path(made) / "omni", QWEN3)
        async with engine_of(folder, "code2wav", "omni-code2wav") as engine:
            codes = random_codes(options.frames, engine.groups)
            for scale in options.layer_scales:
                reweigh(engine._model, CONVOLUTIONS)
                reweigh(engine._model.pre_transformer, 1.0)
                for parameter, weight in engine._model.named_parameters():
                    if parameter.endswith("layer_scale.scale"):
                        torch.nn.init.constant_(weight, scale)
                level(engine._model.decoder[-1], engine.sound(codes))
                whole = engine.sound(codes)
                ways = [("chunked_decode", 325 / 300, chunked(engine, codes, whole))]
                for window, context in options.windows:
                    engine.first, engine.window = min(window, FIRST_FRAMES), window
                    engine.context = context
                    sound, _ = decoded(engine, codes, 5)
                    work = (window + context) / window
                    ways.append((f"{window}, {context} before", work, sound))
                for title, work, sound in ways:
                    distance = Distance.of(sound, whole)
                    found.append({"scale": scale, "way": title, "work": work, **asdict(distance)})
                    cells = [f"{scale:g}", title, f"{work:.1f}", *distance.cells()]
                    print(*cells, file=sys.stderr)
                    rows.append(cells)
    print("Qwen3-Omni, code2wav")
    print(table(["layer scale", "way", "work", "SNR dB", "largest", "spectra dB"], rows))
    return found


def numbers(count: int) -> Callable[[str], tuple[int, ...]]:
    """A type of arguments: so many whole numbers with commas between them."""

    def read(text: str) -> tuple[int, ...]:
        given = tuple(int(part) for part in text.split(","))
        if len(given) != count:
            raise argparse.ArgumentTypeError(f"{count} numbers are needed, not {text!r}")
        return given

    return read


BLOCKS = [
    *((3, 2, 1, 20), (1, 2, 1, 20), (6, 2, 1, 20)),
    *((3, 2, 0, 20), (3, 2, 2, 20), (3, 2, 4, 20), (3, 0, 1, 20), (3, 4, 1, 20), (3, 100, 1, 20)),
    *((3, 4, 2, 20), (3, 8, 4, 20), (3, 100, 100, 20), (3, 100, 100, 40)),
]
WINDOWS = [(25, 25), (5, 25), (25, 10), (25, 50), (25, 72), (25, 100), (25, 150), (25, 600)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--codes", type=int, default=200, help="Qwen2.5-Omni's, 50 a second")
    parser.add_argument("--gains", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--blocks", type=numbers(4), nargs="+", default=BLOCKS,
                        help="WINDOW,PAST,FUTURE,OVERLAP")  # fmt: skip
    parser.add_argument("--frames", type=int, default=400, help="Qwen3-Omni's, 12.5 a second")
    parser.add_argument("--layer-scales", type=float, nargs="+", default=[0.01, 0.1, 0.3])
    parser.add_argument("--windows", type=numbers(2), nargs="+", default=WINDOWS,
                        help="WINDOW,CONTEXT")  # fmt: skip
    parser.add_argument("--models", nargs="+", choices=["2.5", "3"], default=["2.5", "3"])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()

    results: dict[str, Any] = {"machine": machine()}
    if "2.5" in options.models:
        results["token2wav"] = asyncio.run(token2wav(options))
        print()
    if "3" in options.models:
        results["code2wav"] = asyncio.run(code2wav(options))
    if options.out:
        write_json(options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
