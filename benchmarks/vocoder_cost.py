"""What windows of speech cost on a device: token2wav of Qwen2.5-Omni, code2wav of Qwen3-Omni.

    python benchmarks/vocoder_cost.py --out vocoder_cost.json
    python benchmarks/vocoder_cost.py --tiny --device cpu --codes 96 --frames 50 --repeats 1

Both in their published size, with random weights. An engine decodes one utterance whose codes are
all there, handed over in a talker's portions: seconds are those of the decoding alone. ``work`` is
how many frames are computed for each that is heard; RTF is seconds by seconds of speech; "first"
is when the first packet is there, which is the time of the first window. What windows do to the
sound is what ``omni_windows.py`` measures.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import machine, table, write_json

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from omni_stages import omni_stage
from omni_windows import sizes_of
from tiny_qwen3_omni import make_qwen3_omni
from tiny_qwen_omni import make_qwen_omni

from omniq.engines import create_engine
from omniq.engines.base import Chunk, NullEmit, StageInput, StageRequest

#: Blocks of a window, before it and behind it; the first are the defaults.
BLOCKS = [(3, 2, 1), (6, 2, 1), (12, 2, 1)]
#: Frames of a window, and before it; the first are the defaults.
FRAMES = [(25, 25), (25, 50), (25, 72), (50, 25), (50, 72), (100, 72)]
DTYPES = ("bfloat16", "float32")
#: Frames of a block, and of the vocoder's overlap.
BLOCK, OVERLAP = 24, 20


def published_token2wav() -> dict[str, Any]:
    """Settings of ``config.json``; the classes' defaults are the published ones."""
    from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as classes

    return {
        "dit_config": classes.Qwen2_5OmniDiTConfig().to_dict(),
        "bigvgan_config": classes.Qwen2_5OmniBigVGANConfig().to_dict(),
    }


def published_code2wav() -> dict[str, Any]:
    """Settings of ``config.json``; the class's defaults are the published ones."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
    )

    return Qwen3OmniMoeCode2WavConfig().to_dict()


@dataclass(frozen=True, slots=True)
class Way:
    """How an utterance is decoded: what is set on the engine, and codes handed over at once; 0:
    all, and nothing is streamed.
    """

    name: str
    work: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    portion: int = 0


class Bench:
    """Measures ways to decode one utterance."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: list[dict[str, Any]] = []

    async def token2wav(self, folder: Path) -> None:
        """Qwen2.5-Omni's: flow matching by blocks."""
        shape = {} if self.options.tiny else {"token2wav_config": published_token2wav()}
        make_qwen_omni(folder, shape, (1.0, 1.0), device=self.options.device)
        codes = self._codes(self.options.codes)
        stage = ("token2wav", "omni-token2wav", "float32")
        ways = [Way("whole")]
        for blocks, past, future in BLOCKS:
            name = f"{blocks} blocks, {past} before, {future} behind"
            sizes = sizes_of(BLOCK, blocks, past, future, OVERLAP)
            work = (blocks + past + future) / blocks
            ways.append(Way(name, work, {"sizes": sizes}, 12))
        await self._measure(folder, stage, codes, ways)

    async def code2wav(self, folder: Path) -> None:
        """Qwen3-Omni's: a causal transformer and convolutions."""
        shape = {} if self.options.tiny else {"code2wav_config": published_code2wav()}
        make_qwen3_omni(folder, shape, scale=1.0)
        groups = published_code2wav()["num_quantizers"] if shape else 4
        codes = self._codes(self.options.frames, groups)
        ways = [Way("whole, by 300 frames")]
        for window, context in FRAMES:
            name, work = f"{window} frames, {context} before", (window + context) / window
            ways.append(Way(name, work, {"window": window, "context": context}, 5))
        for dtype in DTYPES:
            await self._measure(folder, ("code2wav", "omni-code2wav", dtype), codes, ways)

    def _codes(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(3))

    async def _measure(
        self, folder: Path, stage: tuple[str, str, str], codes: torch.Tensor, ways: list[Way]
    ) -> None:
        """Decode several times by each way; ``stage`` is its id, its engine and its dtype."""
        name, engine_name, dtype = stage
        config = omni_stage(folder, name, engine_name, dtype=dtype)
        engine: Any = create_engine(config, self.options.device)
        await engine.load()
        for way in ways:
            for setting, value in way.settings.items():
                assert hasattr(engine, setting), setting
                setattr(engine, setting, value)
            self._add(name, dtype, way, await self._decode(engine, codes, way))
        await engine.unload()

    async def _decode(self, engine: Any, codes: torch.Tensor, way: Way) -> list[dict[str, Any]]:
        """The metrics of each time."""
        metrics = []
        for number in range(self.options.repeats + 1):
            request = StageRequest("one", {}, stream=bool(way.portion))
            given = StageInput(chunks=_portions(codes, way.portion or len(codes)))
            output = await engine.run(request, {"codes": given}, NullEmit())
            assert output.tensors["audio"]["audio"].isfinite().all()
            if number:  # kernels are chosen and memory is taken by the first
                metrics.append(output.metrics)
        return metrics

    def _add(self, name: str, dtype: str, way: Way, metrics: list[dict[str, Any]]) -> None:
        busy = statistics.median(m["decode_seconds"] for m in metrics)
        row = {
            "model": name, "dtype": dtype, "way": way.name, "work": way.work, "seconds": busy,
            "all_seconds": [m["decode_seconds"] for m in metrics],
            "rtf": busy / metrics[0]["audio_seconds"],
            "first": statistics.median(m["first_packet_seconds"] for m in metrics),
            "speech": metrics[0]["audio_seconds"],
        }  # fmt: skip
        self.found.append(row)
        print(*self._cells(row), flush=True)

    @staticmethod
    def _cells(row: Mapping[str, Any]) -> list[str]:
        return [
            f"{row['model']}, {row['dtype']}: {row['way']}",
            f"{row['work']:.2f}",
            *(f"{row[name]:.4f}" for name in ("seconds", "rtf", "first")),
        ]

    def report(self) -> None:
        """The table."""
        header = ["decoding", "work", "seconds", "RTF", "first"]
        print("\n" + table(header, [self._cells(row) for row in self.found]))


async def _portions(codes: torch.Tensor, size: int) -> AsyncIterator[Chunk]:
    for i, part in enumerate(codes.split(size)):
        yield Chunk(i, tensors={"codes": part})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="the tests' tiny models")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--codes", type=int, default=180, help="of Qwen2.5-Omni, 50 a second")
    parser.add_argument("--frames", type=int, default=250, help="of Qwen3-Omni, 12.5 a second")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=["2.5", "3"], default=["2.5", "3"])
    parser.add_argument("--tf32", action="store_true", help="matrix products of float32 in TF32")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    bench = Bench(options)
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
        try:
            if "2.5" in options.models:
                asyncio.run(bench.token2wav(Path(folder) / "qwen2.5"))
            if "3" in options.models:
                asyncio.run(bench.code2wav(Path(folder) / "qwen3"))
        finally:
            bench.report()
            gpu = torch.cuda.get_device_name(options.device) if options.device != "cpu" else None
            if options.out:
                write_json(options.out, {"machine": machine(), "gpu": gpu, "found": bench.found})
            print(f"{gpu or 'CPU'}, {options.codes} codes and {options.frames} frames")


if __name__ == "__main__":
    main()
