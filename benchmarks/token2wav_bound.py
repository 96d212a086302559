"""What bounds a window of Qwen2.5-Omni's token2wav on a GPU: the device, or the host that feeds it.

    python benchmarks/token2wav_bound.py
    python benchmarks/token2wav_bound.py --tiny --device cpu

The DiT in its published size with random weights in float32: one evaluation as the solver of a
window does it, with and without the codes, of several lengths and for several requests at once.
``eager`` is the seconds of a call, ``kernels`` how many it starts and the sum of their times by
torch's profiler, ``graph`` the replay of the same kernels captured in a CUDA graph, which must give
the same bits. All of it again with matrix products in TF32. Then the same of the vocoder, without a
graph.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from omni_stages import omni_stage
from tiny_qwen_omni import make_qwen_omni
from vocoder_cost import published_token2wav

from omniq.engines import create_engine

#: Frames, and requests at once. 144 frames are a window of the default size with those beside it.
DIT = [(144, 1), (264, 1), (480, 1), (144, 4)]
VOCODER = [92, 112, 184, 300]
REPEATS = 10


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Of one of several calls behind each other."""
    for _ in range(2):
        call()
    wait(device)
    begun = time.perf_counter()
    for _ in range(REPEATS):
        call()
    wait(device)
    return (time.perf_counter() - begun) / REPEATS * 1000


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def kernels(call: Callable[[], object], device: str) -> str:
    """How many there are in a call, and their milliseconds on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        wait(device)
    cuda = torch.autograd.DeviceType.CUDA
    found = [event for event in profile.events() if event.device_type == cuda]
    return f"{len(found)} kernels of {sum(e.device_time_total for e in found) / 1000:.2f} ms"


def graphed(call: Callable[[], torch.Tensor], device: str) -> str:
    """Milliseconds of a replay.

    Raises:
        SystemExit: it gives something else.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    taken = milliseconds(graph.replay, device)
    if not torch.equal(made, call()):
        sys.exit("the graph gives something else")
    return f"graph {taken:.2f} ms"


@torch.no_grad()
def measure(engine: Any, device: str) -> None:
    cuda = device != "cpu"

    def say(title: str, call: Callable[[], torch.Tensor], graph: bool) -> None:
        parts = [f"{title}: eager {milliseconds(call, device):.2f} ms"]
        if cuda:
            parts.append(kernels(call, device))
            if graph:
                parts.append(graphed(call, device))
        print(", ".join(parts), flush=True)

    flow = engine.flow_of({})
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        for frames, requests in DIT:
            rows = 2 * requests
            given = {
                "hidden_states": torch.randn(rows, frames, engine.mel_size, device=device),
                "speaker_embedding": flow.cond[:, None].expand(rows, frames, -1).contiguous(),
                "condition_vector": flow.voice[:1].expand(rows, -1).contiguous(),
                "quantized_code": torch.randint(0, 60, (rows, frames // 2), device=device),
                "time_step": torch.tensor(0.3, device=device),
            }
            title = f"{frames} frames of {requests} requests, {precision} precision"
            say(title, lambda given=given: engine._dit(**given, apply_cfg=False), True)  # type: ignore[misc]
    torch.set_float32_matmul_precision("highest")
    for frames in VOCODER:
        mel = torch.randn(1, engine.mel_size, frames, device=device)
        say(f"vocoder, {frames} frames", lambda mel=mel: engine._vocoder(mel), False)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="the tests' tiny model")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as name:
        folder = Path(name) / "omni"
        shape = {} if options.tiny else {"token2wav_config": published_token2wav()}
        make_qwen_omni(folder, shape, (1.0, 1.0), device=options.device)
        engine = create_engine(omni_stage(folder, "token2wav", "omni-token2wav"), options.device)
        asyncio.run(engine.load())
    measure(engine, options.device)


if __name__ == "__main__":
    main()
