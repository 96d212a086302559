"""What the examples' command lines have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def arguments(about: str, model: str, *, output: str = "") -> argparse.ArgumentParser:
    """A parser for: a model, and the file to write."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("model", nargs="?", default=model, help=f"folder or hub name ({model})")
    if output:
        parser.add_argument("-o", "--output", type=Path, default=Path(output))
    return parser


def diffusion_arguments(about: str, model: str, output: str) -> argparse.ArgumentParser:
    """The same for a diffusion model: size and steps too."""
    parser = arguments(about, model, output=output)
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--dtype", default="auto")
    return parser


def defaults(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Options of ``OmniLLM`` that make the chosen size and steps the DiT stage's defaults."""
    chosen = {"height": args.height, "width": args.width, "num_inference_steps": args.steps, **more}
    given = {name: value for name, value in chosen.items() if value is not None}
    return {
        "engine_args": {"dtype": args.dtype},
        "stage_overrides": {"dit": {"defaults": given}} if given else {},
    }
