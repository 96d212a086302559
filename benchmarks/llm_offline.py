"""Offline throughput: 64 requests through OmniLLM against native vLLM, and hidden states on/off.

    python benchmarks/llm_offline.py --model build/smollm2-135m-instruct [--rounds 5] [--json FILE]

Three systems are up at the same time and take turns, round by round, each with the same prompts:
vLLM's ``AsyncLLM`` in a process of its own; omniq with one worker; omniq whose stage hands out the
hidden states of every generated token as a file. Same weights, same engine arguments, greedy, no
end token: so each makes exactly requests x output tokens, and the texts are compared.
``--device cuda`` does the same on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from common import load, machine, now, table, write_json
from llm_common import arguments, engine_args, offer_pipelines, prompts, set_environment

NATIVE, OMNIQ, STATES = "native vLLM", "omniq", "omniq, hidden states"


class Native:
    """vLLM in a child process."""

    def __init__(self, given: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve_native, args=(child, given))
        self._process.start()
        assert self._pipe.recv() == "ready"

    def run(self, ids: list[list[int]], tokens: int) -> tuple[float, list[str]]:
        self._pipe.send((ids, tokens))
        seconds, texts = self._pipe.recv()
        return seconds, texts

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(60)


def _serve_native(pipe: Connection, given: argparse.Namespace) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    async def serve() -> None:
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(given.model), disable_log_stats=True, **engine_args(given))
        )
        count = 0

        async def one(ids: list[int], tokens: int, name: str) -> str:
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                # What an offline caller asks for, and the cheapest.
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt: Any = {"prompt_token_ids": ids}
            text = ""
            async for output in engine.generate(prompt, sampling, name):
                text = output.outputs[0].text
            return text

        pipe.send("ready")
        while (work := await asyncio.to_thread(pipe.recv)) is not None:
            all_ids, tokens = work
            count += 1
            started = now()
            texts = await asyncio.gather(
                *[one(ids, tokens, f"{count}-{i}") for i, ids in enumerate(all_ids)]
            )
            pipe.send((now() - started, texts))
        engine.shutdown()

    asyncio.run(serve())


class Omniq:
    """A whole omniq system under OmniLLM."""

    def __init__(self, pipeline: str) -> None:
        from omniq import OmniLLM

        self._llm = OmniLLM(pipeline, ready_timeout=600)

    def run(self, ids: list[list[int]], tokens: int) -> tuple[float, list[str]]:
        started = now()
        outputs = self._llm.generate(
            [{"token_ids": i} for i in ids], temperature=0.0, max_tokens=tokens, ignore_eos=True
        )
        return now() - started, [o.text or "" for o in outputs]

    def close(self) -> None:
        self._llm.close()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--no-states", action="store_true", help="Leave hidden states out.")
    given = parser.parse_args()
    set_environment(given)
    offer_pipelines(given)
    systems: dict[str, Native | Omniq] = {}
    try:
        systems[NATIVE] = Native(given)
        systems[OMNIQ] = Omniq("bench")
        if not given.no_states:
            systems[STATES] = Omniq("bench-states")
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        equal: dict[str, int] = dict.fromkeys(systems, 0)
        for number in range(-1, given.rounds):  # round -1 warms up
            ids = prompts(given, number)
            names = list(systems) if number % 2 else list(reversed(systems))
            said = {}
            for name in names:
                time.sleep(given.pause)
                took, said[name] = systems[name].run(ids, given.output_tokens)
                if number >= 0:
                    seconds[name].append(took)
            for name in systems:
                equal[name] += sum(map(str.__eq__, said[name], said[NATIVE])) * (number >= 0)
            last = "" if number < 0 else ", ".join(f"{n} {t[-1]:.2f} s" for n, t in seconds.items())
            print(f"round {number}: load {load():.1f} {last}", flush=True)
    finally:
        for system in systems.values():
            system.close()
    report(given, seconds, equal)


def report(
    given: argparse.Namespace, seconds: dict[str, list[float]], equal: dict[str, int]
) -> None:
    tokens = given.requests * given.output_tokens
    steps = given.output_tokens
    rows = []
    for name, samples in seconds.items():
        against = OMNIQ if name == STATES else NATIVE
        ratios = [a / b for a, b in zip(seconds[against], samples, strict=True)]
        rows.append(
            [
                name,
                f"{tokens / statistics.median(samples):,.0f}",
                f"{statistics.median(samples) / steps * 1e3:.1f}",
                f"{statistics.median(ratios):.3f} x {against}",
                f"{min(ratios):.3f}-{max(ratios):.3f}",
                f"{equal[name]}/{given.requests * given.rounds}",
            ]
        )
    header = ["", "tokens/s", "ms a step", "throughput", "of the rounds", "texts equal"]
    print(table(header, rows))
    if given.json:
        settings = {k: str(v) for k, v in vars(given).items()}
        write_json(
            given.json,
            {"machine": machine(), "settings": settings, "seconds": seconds, "equal": equal},
        )


if __name__ == "__main__":
    main()
