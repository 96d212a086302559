"""How soon an omni model speaks: stages that stream to each other, and transformers' ``generate``.

    python benchmarks/omni_stream.py --rounds 4 --out omni_stream.json

A Qwen2.5-Omni of random weights (``omni_model.py``; lengths are bounded, as such weights seldom end
by themselves), text to text and speech, greedy. On one side
``Qwen2_5OmniForConditionalGeneration.generate`` with all cores, one request after the other (it
speaks for one at a time); on the other omniq's thinker, talker and token2wav, each a worker process
of its own with its share of the cores, behind a real Valkey. Both are up in the same run and take
turns. Measured at the client from the moment of asking:

- TTFT: the first text. ``generate`` has nothing before its end.
- TTFP: the first packet of sound.
- total: the end of the answer.
- RTF: seconds until all answers were there, by seconds of speech in them.
- stall: for how long the sound would stop while somebody listens from the first packet on.

Text and number of codes are compared with those of ``generate``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Times, load, machine, now, table, write_json
from omni_model import make_omni

WORDS = (
    "a red circle above a blue square",
    "a green circle below a white square",
    "a blue square",
    "a white circle above a red square",
)
SAMPLE_RATE = 24_000
KINDS = ("ttft", "ttfp", "total", "stall")


@dataclass
class Heard:
    """What a client got of one request; seconds since it asked."""

    text: str = ""
    samples: int = 0
    ttft: float = 0.0
    ttfp: float = 0.0
    total: float = 0.0
    stall: float = 0.0
    stages: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of speech."""
        return self.samples / SAMPLE_RATE


class Whole:
    """transformers' ``generate``, for one request after the other."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from qwen_omni_reference import Reference  # of the tests, on the path by omni_model

        self._reference, self._options = Reference(folder), options

    async def ask(self, prompts: Sequence[str]) -> list[Heard]:
        begun, heard = now(), []
        for prompt in prompts:
            text, samples = await asyncio.to_thread(self._answer, prompt)
            end = now() - begun
            heard.append(Heard(text, samples, ttft=end, ttfp=end, total=end))
        return heard

    def _answer(self, prompt: str) -> tuple[str, int]:
        from qwen_omni_reference import turn

        tokens, codes = self._options.tokens, self._options.codes
        made, _, waveform = self._reference.answer(
            self._reference.inputs(turn(prompt)), tokens, codes,
            thinker_do_sample=False, thinker_min_new_tokens=tokens,
            talker_do_sample=False, talker_min_new_tokens=codes,
        )  # fmt: skip
        return self._reference.text(made), len(waveform)


class Streamed:
    """omniq's three stages."""

    def __init__(self, llm: Any, options: argparse.Namespace) -> None:
        from omniq.jobs.store import JobStore

        self._llm, self._options = llm, options
        self._store = JobStore.from_settings()

    async def close(self) -> None:
        await self._store.close()

    async def ask(self, prompts: Sequence[str]) -> list[Heard]:
        return list(await asyncio.gather(*(self._one(prompt) for prompt in prompts)))

    async def _one(self, prompt: str) -> Heard:
        tokens, codes = self._options.tokens, self._options.codes
        heard, begun = Heard(), now()
        job = await self._llm.submit(
            {"prompt": prompt},
            {
                "max_tokens": tokens, "min_tokens": tokens, "temperature": 0.0, "seed": 1,
                "talker": {"max_tokens": codes, "min_tokens": codes, "temperature": 0.0},
            },
        )  # fmt: skip
        async for event in self._store.events(job):
            if event is None:
                continue
            if event.type == "stage.delta":
                self._take(heard, event.data, now() - begun)
            if event.final:
                break
        heard.total = now() - begun
        record = await self._store.get(job)
        if "text" not in record.values:
            raise RuntimeError(f"the job did not succeed: {record}")
        heard.text = str(record.values["text"])
        heard.stages = {name: dict(stage.metrics) for name, stage in record.stages.items()}
        return heard

    def _take(self, heard: Heard, data: Any, at: float) -> None:
        if data["output"] == "text":
            heard.ttft = heard.ttft or at
        elif data["output"] == "audio":
            heard.ttfp = heard.ttfp or at
            # Nothing may be played before it is there: how late this packet is.
            heard.stall = max(heard.stall, at - heard.ttfp - heard.seconds)
            heard.samples += len(base64.b64decode(data["value"]["audio"])) // 2


def same(whole: Sequence[Heard], streamed: Sequence[Heard]) -> None:
    """Both must have said the same."""
    for one, other in zip(whole, streamed, strict=True):
        if (one.text, one.samples) != (other.text, other.samples):
            raise SystemExit(f"the answers differ: {one} and {other}")


@dataclass
class Results:
    """Of one side at one number of requests in flight, by rounds."""

    kinds: dict[str, list[list[float]]] = field(default_factory=lambda: {k: [] for k in KINDS})
    rtf: list[float] = field(default_factory=list)
    stages: list[dict[str, dict[str, float]]] = field(default_factory=list)

    def add(self, heard: Sequence[Heard]) -> None:
        for kind, rounds in self.kinds.items():
            rounds.append([getattr(h, kind) for h in heard])
        self.rtf.append(max(h.total for h in heard) / sum(h.seconds for h in heard))
        self.stages += [h.stages for h in heard if h.stages]

    def times(self, kind: str) -> Times:
        return Times(self.kinds[kind])

    def metric(self, stage: str, name: str) -> float:
        return statistics.median(s[stage][name] for s in self.stages)


async def run(folder: Path, options: argparse.Namespace) -> dict[tuple[str, int], Results]:
    """Rounds in which both take turns, at each number of requests in flight."""
    from omniq import AsyncOmniLLM

    whole = Whole(folder, options)
    counts = sorted({1, options.in_flight})
    found = {(side, n): Results() for n in counts for side in ("generate", "omniq")}
    async with AsyncOmniLLM(str(folder), stage_overrides=options.stage_overrides) as llm:
        streamed = Streamed(llm, options)
        same(await whole.ask(WORDS[:1]), await streamed.ask(WORDS[:1]))  # warm-up
        for number in range(options.rounds):
            for n in counts:
                prompts = [WORDS[(number + i) % len(WORDS)] for i in range(n)]
                alone = await whole.ask(prompts)
                together = await streamed.ask(prompts)
                same(alone, together)
                found["generate", n].add(alone)
                found["omniq", n].add(together)
            print(f"round {number + 1} of {options.rounds}, load {load():.1f}", file=sys.stderr)
        await streamed.close()
    return found


def report(found: dict[tuple[str, int], Results]) -> None:
    """The tables."""
    rows = []
    for (side, n), results in found.items():
        whole = found["generate", n]
        cells = []
        for kind in KINDS[:3]:
            times = results.times(kind)
            ratio = times.times_faster_than(whole.times(kind))
            cells.append(f"{times.median:.2f} ({ratio:.1f} ×)")
        rtf, stall = statistics.median(results.rtf), results.times("stall").median
        faster = statistics.median(a / b for a, b in zip(whole.rtf, results.rtf, strict=True))
        rows.append(
            [f"{side}, {n} in flight", *cells, f"{rtf:.2f} ({faster:.1f} ×)", f"{stall:.2f}"]
        )
    print(table(["seconds (times faster)", "TTFT", "TTFP", "total", "RTF", "stall"], rows))
    print()
    rows = []
    for (side, n), results in found.items():
        if side != "omniq":
            continue
        row = [f"{n} in flight"]
        for stage, name in (
            *(("thinker", "first_token_seconds"), ("thinker", "generation_seconds")),
            *(("talker", "first_token_seconds"), ("talker", "generation_seconds")),
            *(("token2wav", "first_packet_seconds"), ("token2wav", "decode_seconds")),
        ):
            row.append(f"{results.metric(stage, name):.2f}")
        rows.append(row)
    header = ["thinker: first", "all", "talker: first", "all", "token2wav: first", "busy"]
    print(table(["seconds in the stages", *header], rows))


def as_json(
    found: dict[tuple[str, int], Results], options: argparse.Namespace, before: float
) -> dict[str, Any]:
    """Everything measured, in seconds."""
    return {
        "machine": machine(),
        "load": [before, load()],
        "tokens": options.tokens,
        "codes": options.codes,
        "results": [
            {
                "side": side,
                "in_flight": n,
                **{k: {"median_s": r.times(k).median, "rounds_s": r.kinds[k]} for k in KINDS},
                "rtf": r.rtf,
                "stages": r.stages,
            }
            for (side, n), r in found.items()
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=32, help="of the text")
    parser.add_argument("--codes", type=int, default=150, help="of the speech, 50 a second")
    parser.add_argument("--in-flight", type=int, default=3, help="requests, beside one alone")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--stage-overrides", type=json.loads, default={}, help="as of `omniq serve`"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()

    before = load()
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
        found = asyncio.run(run(make_omni(Path(folder) / "omni"), options))
    report(found)
    print(f"load before and after: {before:.1f}, {load():.1f} on {machine()['cores']} cores")
    if options.out:
        write_json(options.out, as_json(found, options, before))
    return 0


if __name__ == "__main__":
    sys.exit(main())
