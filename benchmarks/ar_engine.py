"""What omniq's AR engine adds to vLLM: the same requests through both, on one loaded model.

    python tools/smollm2.py
    python benchmarks/ar_engine.py [MODEL_FOLDER] [--hidden] [--requests 64] [--tokens 32]

Native is ``AsyncLLM.generate`` of the very engine that omniq has loaded, read to its end; rounds
alternate. The last line is the CPU time that this process spends on a token (the model runs in
another one unless ``--in-process``), which a busy machine does not blur. With ``--hidden`` omniq
also takes out the hidden states of every generated position, and
native runs on a second engine without them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from omniq.config import OmniStageConfig
from omniq.engines import create_engine
from omniq.engines.base import NullEmit, StageInput, StageRequest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import smollm2


def prompts(count: int) -> list[list[int]]:
    """Token ids, different from the first on, so that no prefix is shared."""
    return [[5 + i, *[5 + (i * 31 + j * 7) % 290 for j in range(30)]] for i in range(count)]


async def engine_of(model: Path, *, hidden: bool, in_process: bool) -> Any:
    engine = create_engine(
        OmniStageConfig.model_validate(
            {
                "stage_id": "ar",
                "engine_type": "AR",
                "engine": "vllm",
                "model": str(model),
                "dtype": "bfloat16",
                "max_in_flight": 64,
                "output_modalities": ["text", *(["hidden_states"] if hidden else [])],
                "engine_args": {
                    "max_model_len": 256,
                    "enable_prefix_caching": False,
                    "in_process": in_process,
                },
            }
        )
    )
    await engine.load()
    await engine.warmup()
    return engine


async def ours(engine: Any, ids: list[list[int]], tokens: int) -> float:
    params = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    started = time.perf_counter()
    await asyncio.gather(
        *[
            engine.run(StageRequest(f"r{i}", params), {"token_ids": StageInput(p)}, NullEmit())
            for i, p in enumerate(ids)
        ]
    )
    return len(ids) * tokens / (time.perf_counter() - started)


async def native(engine: Any, ids: list[list[int]], tokens: int, round_: int) -> float:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )

    async def one(i: int, prompt: list[int]) -> None:
        async for _ in engine._engine.generate(tokens_input(prompt), params, f"n{round_}-{i}"):
            pass

    started = time.perf_counter()
    await asyncio.gather(*[one(i, p) for i, p in enumerate(ids)])
    return len(ids) * tokens / (time.perf_counter() - started)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=smollm2.FOLDER)
    parser.add_argument("--hidden", action="store_true")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engine = await engine_of(args.model, hidden=args.hidden, in_process=args.in_process)
    plain = engine
    if args.hidden:
        plain = await engine_of(args.model, hidden=False, in_process=args.in_process)
    ids = prompts(args.requests)
    await native(plain, ids, 4, -1)
    await ours(engine, ids, 4)
    ratios = []
    cpu: list[list[float]] = [[], []]
    for i in range(args.rounds):
        pair = [
            lambda i=i: native(plain, ids, args.tokens, i),
            lambda: ours(engine, ids, args.tokens),
        ]
        order = (0, 1) if i % 2 else (1, 0)
        found = {}
        for which in order:
            before = time.process_time()
            found[which] = await pair[which]()
            cpu[which].append((time.process_time() - before) / (len(ids) * args.tokens) * 1e6)
        ratios.append(found[1] / found[0])
        print(f"native {found[0]:8.1f} tokens/s  omniq {found[1]:8.1f} tokens/s  {ratios[-1]:.3f}")
    print(f"omniq / native: median {statistics.median(ratios):.3f} of {args.rounds} rounds")
    per = [statistics.median(c) for c in cpu]
    print(f"CPU of this process a token: native {per[0]:.0f} us, omniq {per[1]:.0f} us")
    await engine.unload()
    if plain is not engine:
        await plain.unload()


if __name__ == "__main__":
    asyncio.run(main())
