"""How far speech decoded by windows is from the same speech decoded at once.

    OMP_NUM_THREADS=1 python benchmarks/omni_windows.py --out omni_windows.json

token2wav of Qwen2.5-Omni and code2wav of Qwen3-Omni with the layers, attention and filters of the
published configurations, much narrower, and with random weights: each matrix has the standard
deviation ``gain`` / √inputs, so that a layer answers to all it sees. So the figures show which
windows see what the whole run sees, not how speech of the published weights sounds. Compared is
what a stream gives with the engine's own code for windows: signal to noise (dB, higher is nearer)
of sound and of token2wav's spectrogram, the largest error as a share of the largest sample, and the
mean distance of log spectra (dB). ``work`` is how many frames are computed for each frame that is
heard.

Qwen3-Omni's is also compared with ``chunked_decode`` of transformers, whose every chunk lacks its
last samples: what it has is compared where it belongs, and what it lacks counts as right.

The script ends with an error where windows that see everything do not give the whole's sound, and
where windows of ``chunked_decode``'s sizes give anything else than its samples.
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
from omniq.engines.omni.code2wav import WINDOW_FRAMES
from omniq.engines.omni.token2wav import FIRST_BLOCKS
from omniq.engines.omni.windows import Overlap, Sizes

CODES = 64
SEED = 11
#: dB; windows that see everything differ from the whole by rounding only, which is less.
EXACT = 100.0
#: Of the largest sample: two ways to the same numbers.
ROUNDING = 1e-4
#: The sizes of ``chunked_decode`` in transformers.
CHUNK, LEFT = 300, 25
#: Gain of the convolutions that make sound, and standard deviation of the sound.
CONVOLUTIONS, LOUD = 0.7, 0.15
QWEN2_5: dict[str, Any] = {
    "token2wav_config": {
        "dit_config": {
            "hidden_size": 32,
            "num_hidden_layers": 22,
            "num_attention_heads": 2,
            "head_dim": 16,
            "look_ahead_layers": [10],
            "look_backward_layers": [0, 20],
        },
        "bigvgan_config": {"upsample_initial_channel": 64},  # 1 at the end
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


def snr(made: torch.Tensor | None, whole: torch.Tensor | None) -> float | None:
    """dB; of both [n] or [n, channels], without what stays the same all along; None: all equal."""
    assert made is not None and whole is not None, "there is something to compare"
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
    engine: Any, codes: torch.Tensor, portion: int = 0, **params: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sound [samples], and the spectrogram [frames, mel] where there is one: streamed by so many
    codes at once, or as a whole.
    """
    request = StageRequest("one", {"seed": SEED, **params}, stream=bool(portion))
    utterance, sounds = engine.utterance(request), []
    for part in codes.split(portion or len(codes)):
        utterance.push(part)
        if portion:
            sounds += utterance.sounds(ended=False) or ()
    sounds += utterance.sounds(ended=True) or ()
    return torch.cat(sounds), getattr(utterance, "_mel", None)


@asynccontextmanager
async def engine_of(folder: Path, stage: str, name: str) -> AsyncIterator[Any]:
    engine = create_engine(omni_stage(folder, stage, name))
    await engine.load()
    yield engine
    await engine.unload()


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, CODES, shape, generator=torch.Generator().manual_seed(3))


def scope(title: str, config: Any, published: Any, *names: str) -> None:
    """Print what is as published and what is not."""
    sizes = [f"{name} {getattr(config, name)} ({getattr(published, name)})" for name in names]
    print(f"{title}: {', '.join(sizes)}; in brackets: published")


def exact(title: str, *decibels: float | None) -> None:
    """End the script unless all are as near as rounding lets them be."""
    if any(decibel is not None and decibel < EXACT for decibel in decibels):
        shown_ones = ", ".join(map(shown, decibels))
        sys.exit(f"{title}: sees everything, but is {shown_ones} dB from the whole")


def vocoded(engine: Any, mel: torch.Tensor, overlap: int) -> torch.Tensor:
    """Sound of a known spectrogram, by windows of the default size."""
    windows, sounds = Overlap(overlap), []
    for known in [*range(engine.sizes.chunk, len(mel), engine.sizes.chunk), len(mel)]:
        part = windows.ready(known, ended=known == len(mel))
        if part is not None:
            wave = engine.sound(mel[part.start : part.stop])
            begin, end = (at - part.start for at in (part.begin, part.end))
            sounds.append(wave[begin * engine.hop : end * engine.hop])
    return torch.cat(sounds)


async def token2wav(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Qwen2.5-Omni: windows of blocks; of its vocoder alone, frames of overlap."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
        Qwen2_5OmniBigVGANConfig,
        Qwen2_5OmniDiTConfig,
    )

    found: list[dict[str, Any]] = []
    rows: list[list[str]] = []

    def add(gain: float, way: str, work: float, mel: str, distance: Distance, **more: Any) -> None:
        found.append({"gain": gain, "way": way, "work": work, **asdict(distance), **more})
        rows.append([f"{gain:g}", way, f"{work:.1f}", mel, *distance.cells()])
        print(*rows[-1], file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as name:
        folder = make_qwen_omni(Path(name) / "omni", QWEN2_5)
        async with engine_of(folder, "token2wav", "omni-token2wav") as engine:
            scope("DiT", engine._dit.config, Qwen2_5OmniDiTConfig(), "num_hidden_layers",
                  "block_size", "look_ahead_layers", "look_backward_layers", "hidden_size",
                  "mel_dim")  # fmt: skip
            scope("BigVGAN", engine._vocoder.config, Qwen2_5OmniBigVGANConfig(), "upsample_rates",
                  "resblock_kernel_sizes", "upsample_initial_channel")  # fmt: skip
            block, codes = int(engine._dit.block_size), random_codes(options.codes)
            usual = engine.sizes
            for gain in options.gains:
                reweigh(engine._dit, gain)
                reweigh(engine._vocoder, CONVOLUTIONS)
                level(engine._vocoder.conv_post, decoded(engine, codes)[0])
                whole, whole_mel = decoded(engine, codes)
                assert whole_mel is not None
                for blocks, future, overlap in options.blocks:
                    engine.sizes = sizes_of(block, blocks, future, overlap)
                    sound, mel = decoded(engine, codes, 12)
                    mel_snr, way = snr(mel, whole_mel), f"{blocks}, {future}, {overlap}"
                    distance = Distance.of(sound, whole)
                    work = (blocks + future) / blocks
                    add(gain, way, work, shown(mel_snr), distance, mel_snr_db=mel_snr)
                engine.sizes = usual
                for overlap in OVERLAPS:
                    distance = Distance.of(vocoded(engine, whole_mel, overlap), whole)
                    work = 1 + 2 * overlap / usual.chunk
                    add(gain, f"the vocoder alone, {overlap}", work, "", distance)
                exact(f"the vocoder with an overlap of {OVERLAPS[-1]}", distance.snr_db)
                # One interval of the solver, of which the windows can see everything.
                longer = random_codes(max(options.codes, LONG))
                whole, whole_mel = decoded(engine, longer, num_steps=2)
                blocks, future, overlap = ONE_INTERVAL
                engine.sizes = sizes_of(block, blocks, future, overlap)
                sound, mel = decoded(engine, longer, 12, num_steps=2)
                mel_snr, way = snr(mel, whole_mel), f"{blocks}, {future}, {overlap}"
                distance, work = Distance.of(sound, whole), (blocks + future) / blocks
                way = f"one interval: {way}"
                add(gain, way, work, shown(mel_snr), distance, mel_snr_db=mel_snr)
                exact(way, distance.snr_db, mel_snr)
                engine.sizes = usual
    print("\nQwen2.5-Omni, token2wav: blocks of a window, and behind it; frames of overlap")
    print(table(["gain", "window", "work", "mel dB", "SNR dB", "largest", "spectra dB"], rows))
    return found


def sizes_of(block: int, blocks: int, future: int, overlap: int) -> Sizes:
    """What token2wav makes of its arguments; a window is never shorter than the first."""
    first = min(blocks, FIRST_BLOCKS) * block
    return Sizes(blocks * block, future * block, overlap, first)


@torch.no_grad()
def chunked(
    engine: Any, codes: torch.Tensor, whole: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``chunked_decode``, with the whole's samples where its chunks lack some; and bool [samples]:
    where it has its own.
    """
    made = engine._model.chunked_decode(codes.T[None], chunk, LEFT).reshape(-1).float()
    size, total = chunk * engine.samples_a_frame, len(codes) * engine.samples_a_frame
    sound, has, lacks, at = whole.clone(), torch.zeros(len(whole)).bool(), total - len(whole), 0
    for begin in range(0, total, size):
        own = slice(begin, min(begin + size, total) - lacks)
        length = own.stop - own.start
        sound[own], has[own] = made[at : at + length], True
        at += length
    assert at == len(made), "every chunk lacks as many samples"
    return sound, has


async def code2wav(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Qwen3-Omni: windows with so many frames before them."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
    )

    found: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as made:
        folder = make_qwen3_omni(Path(made) / "omni", QWEN3)
        async with engine_of(folder, "code2wav", "omni-code2wav") as engine:
            scope("code2wav", engine._model.config, Qwen3OmniMoeCode2WavConfig(),
                  "num_hidden_layers", "sliding_window", "upsampling_ratios", "upsample_rates",
                  "hidden_size", "decoder_dim", "num_quantizers")  # fmt: skip
            codes = random_codes(options.frames, engine.groups)
            first = engine.first
            for scale in options.layer_scales:
                reweigh(engine._model, CONVOLUTIONS)
                reweigh(engine._model.pre_transformer, 1.0)
                for parameter, weight in engine._model.named_parameters():
                    if parameter.endswith("layer_scale.scale"):
                        torch.nn.init.constant_(weight, scale)
                level(engine._model.decoder[-1], engine.sound(codes))
                whole = engine.sound(codes)
                ways = [
                    (f"chunked_decode({size}, {LEFT})", (size + LEFT) / size, sound)
                    for size in (CHUNK, WINDOW_FRAMES)
                    for sound, _ in [chunked(engine, codes, whole, size)]
                ]
                for window, context in options.windows:
                    engine.first, engine.window = min(window, first), window
                    engine.context = context
                    sound, _ = decoded(engine, codes, 5)
                    work = (window + context) / window
                    ways.append((f"{window}, {context} before", work, sound))
                    if context >= ALL_BEFORE:
                        exact(ways[-1][0], snr(sound, whole))
                same_as_chunked(engine, codes, whole)
                for title, work, sound in ways:
                    distance = Distance.of(sound, whole)
                    found.append({"scale": scale, "way": title, "work": work, **asdict(distance)})
                    cells = [f"{scale:g}", title, f"{work:.1f}", *distance.cells()]
                    print(*cells, file=sys.stderr)
                    rows.append(cells)
    print("\nQwen3-Omni, code2wav: frames of a window, and before it")
    print(table(["layer scale", "way", "work", "SNR dB", "largest", "spectra dB"], rows))
    return found


def same_as_chunked(engine: Any, codes: torch.Tensor, whole: torch.Tensor) -> None:
    """End the script unless windows of equal sizes give the samples of ``chunked_decode``."""
    for size in (CHUNK, WINDOW_FRAMES):
        engine.first, engine.window, engine.context = size, size, LEFT
        sound, _ = decoded(engine, codes, 5)
        theirs, has = chunked(engine, codes, whole, size)
        most = float((sound - theirs)[has].abs().max() / whole.abs().max())
        print(f"windows of {size}, {LEFT} before, from chunked_decode's: {most:.1e} of the largest")
        if most > ROUNDING:
            sys.exit("windows of the same sizes differ from chunked_decode")


def numbers(count: int) -> Callable[[str], tuple[int, ...]]:
    """A type of arguments: so many whole numbers with commas between them."""

    def read(text: str) -> tuple[int, ...]:
        given = tuple(int(part) for part in text.split(","))
        if len(given) != count:
            raise argparse.ArgumentTypeError(f"{count} numbers are needed, not {text!r}")
        return given

    return read


#: Blocks of a window, and behind it; frames of overlap. The first are the defaults.
BLOCKS = [(3, 1, 20), (6, 1, 20), (3, 0, 20), (3, 2, 20), (3, 4, 20)]
#: What one interval of the solver sees: four evaluations, each a block further ahead.
ONE_INTERVAL = (3, 4, 40)
#: Codes of an utterance that no such window holds.
LONG = 192
OVERLAPS = (0, 10, 20, 40)
#: Frames: 8 layers see 71 back each, and the convolutions a few more.
ALL_BEFORE = 600
#: Frames of a window, and before it. The first are the defaults.
WINDOWS = [(25, 25), (50, 25), (25, 50), (25, 72), (100, ALL_BEFORE)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--codes", type=int, default=144, help="Qwen2.5-Omni's, 50 a second")
    parser.add_argument("--gains", type=float, nargs="+", default=[1.0, 1.5])
    parser.add_argument("--blocks", type=numbers(3), nargs="+", default=BLOCKS,
                        help="WINDOW,FUTURE,OVERLAP")  # fmt: skip
    parser.add_argument("--frames", type=int, default=700, help="Qwen3-Omni's, 12.5 a second")
    parser.add_argument("--layer-scales", type=float, nargs="+", default=[0.01, 0.1])
    parser.add_argument("--windows", type=numbers(2), nargs="+", default=WINDOWS,
                        help="WINDOW,CONTEXT")  # fmt: skip
    parser.add_argument("--models", nargs="+", choices=["2.5", "3"], default=["2.5", "3"])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()

    print("Random weights, narrow: figures show what windows see, not how speech sounds.")
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
