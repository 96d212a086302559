"""Measures the model on prompts it never saw: python -m tiny_omni.evaluate FOLDER.

Runs the three stages in one process with the stock pipeline and no server. What a prompt mentions
is checked against the prompt, what it leaves open against the caption that the LM wrote.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tiny_omni.captioner import Caption, write_caption
from tiny_omni.score import ATTRIBUTES, Tally, score_picture
from tiny_omni.shapes import fill, held_out_cases, mentions_agree, parse, parse_caption

GUIDANCE = 1.0
STEPS = 20
SIDE = 64


@dataclass(frozen=True)
class Result:
    """Accuracies by attribute ("overall" over all of them), and how they were measured."""

    accuracy: dict[str, float]
    all_right: float
    captions_consistent: float
    prompts: int
    temperature: float
    guidance: float
    steps: int
    seconds: float


def load_pipeline(folder: Path) -> Any:
    """The stock pipeline of a model folder, in float32 on the CPU."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def paint(
    pipeline: Any, rows: list[Tensor], seeds: list[int], guidance: float, steps: int
) -> list[Image.Image]:
    """One picture for each caption's rows; every picture has its own seed."""
    null = torch.zeros(1, rows[0].shape[-1])
    images = pipeline(
        prompt_embeds=rows,
        negative_prompt_embeds=[null] * len(rows),
        guidance_scale=guidance,
        num_inference_steps=steps,
        height=SIDE,
        width=SIDE,
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
        output_type="pil",
    ).images
    return list(images)


def evaluate(
    folder: Path,
    count: int = 300,
    *,
    temperature: float = 0.0,
    guidance: float = GUIDANCE,
    steps: int = STEPS,
    batch: int = 20,
    seed: int = 0,
    pipeline: Any = None,
) -> Result:
    """Score `count` held-out prompts."""
    begin = time.monotonic()
    pipeline = pipeline or load_pipeline(folder)
    cases = held_out_cases(count, seed)
    tally, consistent, all_right = Tally(), 0, 0
    for at in range(0, count, batch):
        prompts = [prompt for prompt, _ in cases[at : at + batch]]
        seeds = list(range(at, at + len(prompts)))
        captions = [
            write_caption(
                pipeline.text_encoder, pipeline.tokenizer, prompt, temperature=temperature, seed=s
            )
            for prompt, s in zip(prompts, seeds, strict=True)
        ]
        images = paint(pipeline, [c.rows for c in captions], seeds, guidance, steps)
        for prompt, written, image in zip(prompts, captions, images, strict=True):
            results, kept = _judge(prompt, written, image)
            tally.add(results)
            consistent += kept
            all_right += all(ok for _, ok in results)
    return Result(
        accuracy=tally.accuracy(),
        all_right=all_right / count,
        captions_consistent=consistent / count,
        prompts=count,
        temperature=temperature,
        guidance=guidance,
        steps=steps,
        seconds=time.monotonic() - begin,
    )


def _judge(prompt: str, written: Caption, image: Image.Image) -> tuple[list[tuple[str, bool]], int]:
    """Results of one picture, and 1 if the caption kept what the prompt mentions."""
    wanted, told = parse(prompt), parse_caption(written.text)
    assert wanted is not None, prompt
    kept = told is not None and mentions_agree(wanted, told)
    # A caption of another kind leaves the open attributes unset, which no picture satisfies.
    expected = fill(wanted, told) if told is not None and told.kind == wanted.kind else wanted
    return score_picture(image, expected), int(kept)


def format_table(result: Result) -> str:
    """The accuracies as lines of text."""
    lines = [
        f"{result.prompts} held-out prompts, temperature {result.temperature}, guidance "
        f"{result.guidance}, {result.steps} steps, {result.seconds:.0f} s"
    ]
    for name in (*ATTRIBUTES, "overall"):
        if name in result.accuracy:
            lines.append(f"  {name:<12}{result.accuracy[name]:7.1%}")
    lines.append(f"  {'all right':<12}{result.all_right:7.1%}  (pictures without any error)")
    lines.append(f"  {'captions':<12}{result.captions_consistent:7.1%}  (keep the prompt)")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    result = evaluate(
        args.folder,
        args.count,
        temperature=args.temperature,
        guidance=args.guidance,
        steps=args.steps,
        batch=args.batch,
        seed=args.seed,
    )
    print(json.dumps(asdict(result), indent=2) if args.json else format_table(result))


if __name__ == "__main__":
    main()
