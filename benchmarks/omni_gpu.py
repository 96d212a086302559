"""An omni model of the published size on one GPU: omniq's stages, and transformers' ``generate``.

    python benchmarks/omni_gpu.py --out omni_gpu.json
    python benchmarks/omni_gpu.py --tiny --device cpu --tokens 8 --codes 60

Qwen2.5-Omni-7B's shape, layer for layer, with random weights that are made on the device: thinker
and talker in bfloat16, token2wav in float32, as both sides have it. Text to text and speech,
greedy, as long as asked for. What ``omni_stream.py`` says of the measures (TTFT, TTFP, total, RTF,
stall) holds here; sides that take turns in each round are

- ``generate``: one request after the other;
- ``generate, a batch``: all at once, which must then have come at once;
- ``omniq``: thinker, talker and token2wav as worker processes behind a real Valkey, which share the
  device;
- ``omniq, one process``: the three engines in this process, without Celery and Valkey.

First the stages' tokens, codes and sound are compared with those of ``generate``, nothing streamed.
In float32 (``--dtype float32``, with ``--layers`` fewer) they must be equal, or the script ends
with an error. In bfloat16 the two round differently, as ``generate`` has a padded prompt and so
another attention kernel, and what is alike is counted. Each finished part is printed, and written
to ``--out``, at once. Nothing is begun that may not end within ``--budget-s`` of the process.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # before the slow imports: the budget is the process's

import argparse  # noqa: E402
import asyncio  # noqa: E402
import gc  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from contextlib import AsyncExitStack  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from common import load, machine, now, table, write_json  # noqa: E402
from omni_stream import KINDS, SAMPLE_RATE, WORDS, Heard, Results, Streamed  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from omni_stages import Chunks, OmniStages, omni_stage  # noqa: E402
from qwen_omni_reference import SEED, STAGES, Reference, turn  # noqa: E402
from tiny_qwen_omni import make_qwen_omni  # noqa: E402

from omniq.engines import create_engine  # noqa: E402
from omniq.engines.base import StageInput, StageRequest  # noqa: E402

#: A round is begun only if this many times the seconds of the longest before are left.
MARGIN = 1.2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def published(layers: int | None) -> dict[str, Any]:
    """Settings of ``config.json`` of Qwen2.5-Omni-7B but for the tokens' ids; thinker and talker
    with ``layers`` of their 28 and 24.

    The classes' defaults are the published ones but for the talker's and the width of the vision
    tower. 10.7 billion weights.
    """
    from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as classes

    vision = classes.Qwen2_5OmniVisionEncoderConfig(hidden_size=1280)
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]}
    common = {
        "intermediate_size": 18_944,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "initializer_range": 0.02,
        "rope_parameters": rope,
    }
    thinker = {
        **common,
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "num_hidden_layers": layers or 28,
        "num_attention_heads": 28,
    }
    talker = {
        **common,
        "vocab_size": 8448,
        "embedding_size": 3584,
        "hidden_size": 896,
        "num_hidden_layers": layers or 24,
        "num_attention_heads": 12,
        "head_dim": 128,
        **{f"tts_codec_{n}_token_id": i for n, i in CODEC.items()},
    }
    return {
        "thinker_config": {
            "text_config": thinker,
            "audio_config": classes.Qwen2_5OmniAudioEncoderConfig().to_dict(),
            "vision_config": vision.to_dict(),
            "initializer_range": 0.02,
        },
        "talker_config": talker,
        "token2wav_config": {
            "dit_config": classes.Qwen2_5OmniDiTConfig().to_dict(),
            "bigvgan_config": classes.Qwen2_5OmniBigVGANConfig().to_dict(),
        },
    }


CODEC = {"pad": 8292, "start": 8293, "end": 8294, "mask": 8296}


class Whole:
    """transformers' ``generate``."""

    def __init__(self, reference: Reference, options: argparse.Namespace, ends: list[int]) -> None:
        self._reference, self._options, self._ends = reference, options, ends

    async def ask(self, prompts: Sequence[str]) -> list[Heard]:
        """One after the other."""
        begun, heard = now(), []
        for prompt in prompts:
            [(tokens, sound)] = await asyncio.to_thread(self.answers, [prompt])
            heard.append(self._heard(tokens, sound, now() - begun))
        return heard

    async def ask_at_once(self, prompts: Sequence[str]) -> list[Heard]:
        """As one batch."""
        begun = now()
        answers = await asyncio.to_thread(self.answers, prompts)
        return [self._heard(tokens, sound, now() - begun) for tokens, sound in answers]

    def answers(self, prompts: Sequence[str]) -> list[tuple[list[int], torch.Tensor]]:
        """Tokens and waveform of each, by one call."""
        given = [self._reference.inputs(turn(prompt))["input_ids"][0] for prompt in prompts]
        longest = max(map(len, given))
        device = self._reference.model.device
        ids = torch.zeros(len(given), longest, dtype=torch.int64, device=device)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(given):  # the first is padding already
            ids[i, longest - len(row) :] = row
            mask[i, longest - len(row) + 1 :] = 1
        tokens, codes = self._options.tokens, self._options.codes
        made, sounds = self._reference.model.generate(
            input_ids=ids, attention_mask=mask,
            thinker_max_new_tokens=tokens, thinker_min_new_tokens=tokens, thinker_do_sample=False,
            talker_max_new_tokens=codes, talker_min_new_tokens=codes, talker_do_sample=False,
            talker_eos_token_id=self._ends,
        )  # fmt: skip
        sounds = [sounds] if len(given) == 1 else sounds
        return [(m[longest:].tolist(), s.cpu()) for m, s in zip(made, sounds, strict=True)]

    def _heard(self, tokens: list[int], sound: torch.Tensor, at: float) -> Heard:
        return Heard(self._reference.text(tokens), len(sound), ttft=at, ttfp=at, total=at)


class _Told(Chunks):
    """Notes when text and sound came."""

    def __init__(self, output: str, heard: Heard, begun: float) -> None:
        super().__init__(output)
        self._heard, self._begun = heard, begun

    def delta(self, output: str, value: Any) -> None:
        super().delta(output, value)
        self._heard.ttft = self._heard.ttft or now() - self._begun

    async def achunk(
        self, output: str, value: Any = None, tensors: Any = None, *, last: bool = False
    ) -> None:
        await super().achunk(output, value, tensors, last=last)
        if output == "audio":
            heard, at = self._heard, now() - self._begun
            heard.ttfp = heard.ttfp or at
            heard.stall = max(heard.stall, at - heard.ttfp - heard.seconds)
            heard.samples += len(tensors["audio"])


class InProcess:
    """omniq's three engines in this process."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        dtypes = (options.dtype, options.dtype, "float32")
        engines = {"thinker": None, "talker": None, "token2wav": "omni-token2wav"}
        more = {"max_in_flight": 16}
        self.stages = OmniStages(
            {
                i: create_engine(omni_stage(folder, i, engines[i], dtype=d, **more), options.device)
                for i, d in zip(STAGES, dtypes, strict=True)
            }
        )
        tokens, codes = options.tokens, options.codes
        greedy = {"temperature": 0.0, "seed": SEED}
        self._params: dict[str, dict[str, Any]] = {
            "thinker": {**greedy, "min_tokens": tokens, "max_tokens": tokens},
            "talker": {**greedy, "min_tokens": codes, "max_tokens": codes,
                       "repetition_penalty": 1.05},
            "token2wav": {"seed": SEED},
        }  # fmt: skip

    async def load(self) -> None:
        for engine in self.stages.engines.values():
            await engine.load()
            await engine.warmup()

    async def close(self) -> None:
        for engine in self.stages.engines.values():
            await engine.unload()

    async def whole(self, prompt: str) -> dict[str, Any]:
        """Outputs by stage, nothing streamed."""
        return await self.stages.whole(self._params, messages=turn(prompt))

    async def ask(self, prompts: Sequence[str]) -> list[Heard]:
        """All at once, streamed."""
        return list(await asyncio.gather(*(self._one(p) for p in prompts)))

    async def _one(self, prompt: str) -> Heard:
        heard, begun = Heard(), now()
        emits = [_Told(output, heard, begun) for output in ("reply", "codes", "audio")]
        passed = {"messages": StageInput(turn(prompt))}
        runs = []
        for (name, engine), emit in zip(self.stages.engines.items(), emits, strict=True):
            run = asyncio.ensure_future(
                engine.run(StageRequest(prompt, self._params[name]), passed, emit)
            )
            run.add_done_callback(lambda _, e=emit: e.queue.put_nowait(None))
            runs.append(run)
            passed = {emit.output: StageInput(chunks=emit.read())}
        outputs = await asyncio.gather(*runs)
        heard.total, heard.text = now() - begun, str(outputs[0].values["text"])
        heard.stages = {
            name: dict(o.metrics) for name, o in zip(self.stages.engines, outputs, strict=True)
        }
        return heard


class Bench:
    """Runs what there is time for, and keeps what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        cuda = options.device != "cpu"
        self.kept: dict[str, Any] = {
            "machine": machine(),
            "gpu": torch.cuda.get_device_name(options.device) if cuda else None,
            **{n: getattr(options, n) for n in ("tokens", "codes", "dtype", "layers", "tiny")},
            "alike": [],
            "results": [],
        }
        self.found: dict[tuple[str, int], Results] = {}
        #: How many texts were those of ``generate``, by side: [alike, all].
        self.texts: dict[str, list[int]] = {}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)

    async def run(self, folder: Path) -> None:
        options = self.options
        shape = {} if options.tiny else published(options.layers)
        scale = (6.0, 4.0) if options.tiny else (1.0, 1.0)
        dtype = DTYPES[options.dtype]
        make_qwen_omni(folder, shape, scale, device=options.device, dtype=dtype)
        gc.collect()
        torch.cuda.empty_cache()
        self.say("model made")
        reference = Reference(folder, options.device, dtype)
        config = reference.model.config.talker_config
        ends = [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]
        whole, near = Whole(reference, options, ends), InProcess(folder, options)
        self.say("generate is loaded")
        await near.load()
        self.say("engines are loaded in this process")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(near.close)
            await self._compare(reference, whole, near)
            sides: dict[str, Any] = {"generate": whole.ask, "omniq, one process": near.ask}
            if not options.no_workers:
                sides["omniq"] = (await self._workers(folder, stack)).ask
                self.say("workers are ready")
            await self._rounds(sides, whole)

    async def _workers(self, folder: Path, stack: AsyncExitStack) -> Streamed:
        from omniq import AsyncOmniLLM

        llm = AsyncOmniLLM(str(folder), ready_timeout=300, engine="transformers")
        await stack.enter_async_context(llm)
        streamed = Streamed(llm, self.options)
        stack.push_async_callback(streamed.close)
        return streamed

    async def _compare(self, reference: Reference, whole: Whole, near: InProcess) -> None:
        """Tokens, codes and sound with those of ``generate``."""
        rows = []
        for prompt in WORDS[: self.options.compare]:
            [(tokens, sound)] = whole.answers([prompt])
            codes = reference.codes
            made = await near.whole(prompt)
            got = made["thinker"].tensors["token_ids"]["token_ids"].tolist()
            said = made["talker"].tensors["codes"]["codes"].tolist()
            heard = made["token2wav"].tensors["audio"]["audio"]
            length = min(len(heard), len(sound))
            error = float((heard[:length] - sound[:length]).abs().max() / sound.abs().max())
            row = {
                "tokens": [alike(got, tokens), len(tokens), len(set(tokens))],
                "codes": [alike(said, codes), len(codes), len(set(codes))],
                "sound": error,
            }
            self.kept["alike"].append(row)
            rows.append([prompt, *("{} of {}, {} different".format(*row[n]) for n in
                                   ("tokens", "codes")), f"{error:.1e}"])  # fmt: skip
            if self.options.dtype == "float32" and (got, said) != (tokens, codes):
                print(table(["prompt", "tokens", "codes", "sound"], rows))
                sys.exit("in float32 tokens and codes must be those of generate")
        print(table(["equal from the first on", "tokens", "codes", "sound: largest error"], rows))
        self._save()

    async def _rounds(self, sides: dict[str, Any], whole: Whole) -> None:
        await self._warm_up(sides)
        longest: dict[int, float] = {}
        for number in range(self.options.rounds):
            for n in self.options.in_flight:
                left = self.options.budget_s - (time.monotonic() - STARTED)
                if left < MARGIN * (needed := longest.get(n, n * max(longest.values(), default=0))):
                    self.say(f"skipped {n} in flight: may take {needed:.0f} s, {left:.0f} are left")
                    continue
                prompts, begun = [WORDS[(number + i) % len(WORDS)] for i in range(n)], now()
                await self._round(prompts, sides, whole)
                longest[n] = max(longest.get(n, 0.0), now() - begun)
                self._save()

    async def _warm_up(self, sides: dict[str, Any]) -> None:
        """A whole answer of each: kernels are loaded, and memory is taken, for every shape."""
        for side, ask in sides.items():
            begun = now()
            await ask(WORDS[:1])
            self.say(f"{side} is warm: {now() - begun:.1f} s")

    async def _round(self, prompts: list[str], sides: dict[str, Any], whole: Whole) -> None:
        n, asked = len(prompts), dict(sides)
        if n > 1:
            asked["generate, a batch"] = whole.ask_at_once
        answers = {}
        for side, ask in asked.items():
            begun = now()
            answers[side] = await ask(prompts)
            self.say(f"{side}, {n} in flight: {now() - begun:.1f} s")
        for side, heard in answers.items():
            self.found.setdefault((side, n), Results()).add(heard)
            if side != "generate":
                same = [a.text == b.text for a, b in zip(heard, answers["generate"], strict=True)]
                count = self.texts.setdefault(side, [0, 0])
                count[0], count[1] = count[0] + sum(same), count[1] + n
            if (wrong := [h.samples for h in heard if h.samples != self._samples]) or not all(
                h.text for h in heard
            ):
                sys.exit(f"{side}: {wrong} samples instead of {self._samples}, or no text")

    @property
    def _samples(self) -> int:
        return self.options.codes * SAMPLE_RATE // 50

    def _save(self) -> None:
        self.kept["results"] = [
            {
                "side": side,
                "in_flight": n,
                **{kind: results.kinds[kind] for kind in KINDS},
                "rtf": results.rtf,
                "stages": results.stages,
            }
            for (side, n), results in self.found.items()
        ]
        self.kept |= {"texts": self.texts, "load": load()}
        if self.options.out:
            write_json(self.options.out, self.kept)

    def report(self) -> None:
        """The tables."""
        rows, inner = [], []
        for (side, n), results in sorted(self.found.items(), key=lambda f: (f[0][1], f[0][0])):
            name = f"{side}, {n} in flight"
            cells = [f"{results.times(kind).median:.3f}" for kind in KINDS]
            rows.append([name, *cells, f"{sorted(results.rtf)[len(results.rtf) // 2]:.3f}"])
            if results.stages:
                inner.append([name, *(f"{results.metric(*m):.3f}" for m in METRICS)])
        print("\n" + table(["seconds", "TTFT", "TTFP", "total", "stall", "RTF"], rows))
        header = ["thinker: first", "all", "talker: first", "all", "token2wav: first", "busy"]
        print("\n" + table(["seconds in the stages", *header], inner))
        print(f"\ntexts equal to those of generate: {self.texts}; {self.kept['gpu']}")


METRICS = [
    *(("thinker", "first_token_seconds"), ("thinker", "generation_seconds")),
    *(("talker", "first_token_seconds"), ("talker", "generation_seconds")),
    *(("token2wav", "first_packet_seconds"), ("token2wav", "decode_seconds")),
]


def alike(made: Sequence[int], expected: Sequence[int]) -> int:
    """How many are equal before the first that differs."""
    pairs = enumerate(zip(made, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(made), len(expected)))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="the tests' tiny model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", choices=DTYPES, help="default bfloat16, on the CPU float32")
    parser.add_argument("--layers", type=int, help="of thinker and talker, fewer than published")
    parser.add_argument("--tokens", type=int, default=24, help="of the text")
    parser.add_argument("--codes", type=int, default=120, help="of the speech, 50 a second")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compare", type=int, default=1, help="prompts compared first")
    parser.add_argument("--no-workers", action="store_true", help="without Celery and Valkey")
    parser.add_argument("--folder", type=Path, help="where the model's folder is made")
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--out", type=Path, help="JSON file, written after every part")
    options = parser.parse_args(given)
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    return options


def main() -> None:
    options = parse()
    bench = Bench(options)
    with tempfile.TemporaryDirectory(prefix="omniq-bench-", dir=options.folder) as folder:
        try:
            asyncio.run(bench.run(Path(folder) / "omni"))
        finally:
            bench.report()
    bench.say("done")


if __name__ == "__main__":
    main()
