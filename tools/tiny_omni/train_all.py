"""Trains the whole model and writes its folder: python -m tiny_omni.train_all --out FOLDER.

The three trainings run one after the other, each within its own budget, and each leaves a usable
part of the folder behind. Rendering happens in other processes while the language model trains.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tarfile
import tempfile
import time
from pathlib import Path

import torch

from tiny_omni.dataset import CHUNK, Pictures, make_texts
from tiny_omni.evaluate import evaluate, format_table
from tiny_omni.tokenizer import build_tokenizer
from tiny_omni.train_dit import train_dit
from tiny_omni.train_lm import consistency, train_lm
from tiny_omni.train_vae import train_vae
from tiny_omni.training import Budget

MODEL_INDEX = {
    "_class_name": "ZImagePipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "ZImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", default="lm,vae,dit", help="the others are read from --out")
    parser.add_argument("--resume-dit", action="store_true", help="go on from the saved DiT")
    parser.add_argument("--scenes", type=int, default=400_000)
    parser.add_argument("--prompts-per-scene", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="upper limit of steps for every training")
    parser.add_argument("--batch", type=int, help="overrides the batch size of every training")
    parser.add_argument("--lm-seconds", type=float, default=60)
    parser.add_argument("--vae-seconds", type=float, default=140)
    parser.add_argument("--dit-seconds", type=float, default=240)
    parser.add_argument("--dit-lr", type=float, default=2e-3)
    parser.add_argument("--evaluate", type=int, default=64, help="held-out prompts, 0 for none")
    parser.add_argument("--archive", type=Path, help="also keep the folder in this tar file")
    return parser.parse_args()


def _archive(folder: Path, path: Path | None) -> None:
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)  # written readable by their owner alone, which package data must not be
    if path is not None:
        with tarfile.open(path, "w") as tar:
            tar.add(folder, arcname=folder.name)


def _train(args: argparse.Namespace, scratch: Path) -> None:
    stages, folder, device = args.stages.split(","), args.out, args.device
    size = {"batch": args.batch} if args.batch else {}
    scenes = max(CHUNK, args.scenes // CHUNK * CHUNK)
    # The processes are forked before the first use of CUDA, which does not survive a fork.
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        texts = make_texts(pool, scenes, args.prompts_per_scene, folder, args.seed)
        print(f"{len(texts.tokens)} texts, longest {int((texts.start + texts.length).max())}")
        pending = Pictures(pool, scenes, scratch / "pictures.npy", args.seed)
        if "lm" in stages:
            train_lm(folder, texts, device, Budget(args.lm_seconds, args.steps), **size)
            _archive(folder, args.archive)
        pictures = pending.wait()
    if "vae" in stages:
        train_vae(folder, pictures, device, Budget(args.vae_seconds, args.steps), **size)
        _archive(folder, args.archive)
    if "dit" in stages:
        budget = Budget(args.dit_seconds, args.steps)
        train_dit(
            folder,
            texts,
            pictures,
            device,
            budget,
            resume=args.resume_dit,
            lr=args.dit_lr,
            **size,
        )
        _archive(folder, args.archive)


def main() -> None:
    """Train, save and evaluate."""
    args = _arguments()
    begin = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "tokenizer").exists():
        build_tokenizer().save_pretrained(args.out / "tokenizer")
    (args.out / "model_index.json").write_text(json.dumps(MODEL_INDEX, indent=2) + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        _train(args, Path(scratch))
    print(f"trained in {time.monotonic() - begin:.0f} s", flush=True)
    if args.evaluate:
        for temperature in (0.0, 0.7):
            share = consistency(args.out, args.evaluate * 4, temperature)
            print(f"captions that keep the prompt, temperature {temperature}: {share:.4f}")
        print(format_table(evaluate(args.out, args.evaluate)), flush=True)
    print(f"done in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
