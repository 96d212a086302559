"""Training data: tokenised (prompt, caption) pairs and rendered pictures, made in parallel.

Everything is a function of the seed and the chunk number, so that the text of a scene and its
picture can be made by different processes at different times and still belong together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiny_omni.shapes import Scene, caption, is_held_out, render, sample_scene, short_prompt
from tiny_omni.tokenizer import EOS, chat_text, load_tokenizer

CHUNK = 2000
MAX_TOKENS = 64
MAX_ROWS = 32
"""Caption tokens with the end token; also the multiple that Z-Image pads captions to."""


@dataclass(frozen=True)
class TextTable:
    """Token ids of prompt + caption + end token, several pairs a scene.

    `tokens` [N * K, MAX_TOKENS] int16, zero padded on the right; `start` [N * K] int16 is the
    position whose logits predict the first caption token; `length` [N * K] int16 counts caption
    tokens, the end token included. Pair i belongs to picture i // K.
    """

    tokens: NDArray[np.int16]
    start: NDArray[np.int16]
    length: NDArray[np.int16]


def _scenes(seed: int, chunk: int) -> list[Scene]:
    rng = random.Random(f"{seed}/{chunk}/scenes")
    return [sample_scene(rng) for _ in range(CHUNK)]


def _prompt(scene: Scene, rng: random.Random) -> str:
    while True:
        prompt = short_prompt(scene, rng)
        if not is_held_out(prompt):
            return prompt


def _text_chunk(job: tuple[int, int, int, Path]) -> tuple[Any, Any, Any]:
    seed, chunk, per_scene, folder = job
    tokenizer = load_tokenizer(folder)
    rng = random.Random(f"{seed}/{chunk}/prompts")
    heads, tails = [], []
    for scene in _scenes(seed, chunk):
        for _ in range(per_scene):
            heads.append(chat_text(tokenizer, _prompt(scene, rng)))
            tails.append(caption(scene) + EOS)
    head_ids, tail_ids = tokenizer(heads)["input_ids"], tokenizer(tails)["input_ids"]
    tokens = np.zeros((len(heads), MAX_TOKENS), dtype=np.int16)
    for row, head, tail in zip(tokens, head_ids, tail_ids, strict=True):
        row[: len(head) + len(tail)] = head + tail
    starts = np.array([len(head) - 1 for head in head_ids], dtype=np.int16)
    lengths = np.array([len(tail) for tail in tail_ids], dtype=np.int16)
    assert int(lengths.max()) <= MAX_ROWS
    return tokens, starts, lengths


def _picture_chunk(job: tuple[int, int, int, Path]) -> None:
    seed, chunk, px, path = job
    rng = random.Random(f"{seed}/{chunk}/pictures")
    pictures = np.lib.format.open_memmap(path, mode="r+")
    for i, scene in enumerate(_scenes(seed, chunk)):
        pictures[chunk * CHUNK + i] = np.asarray(render(scene, rng, px))


def make_texts(pool: Pool, scenes: int, per_scene: int, folder: Path, seed: int) -> TextTable:
    """`scenes` * `per_scene` tokenised pairs, with the tokenizer of the model folder."""
    jobs = [(seed, chunk, per_scene, folder) for chunk in range(scenes // CHUNK)]
    tokens, starts, lengths = zip(*pool.map(_text_chunk, jobs, chunksize=1), strict=True)
    return TextTable(np.concatenate(tokens), np.concatenate(starts), np.concatenate(lengths))


class Pictures:
    """Pictures rendered in the background into a memory-mapped [N, px, px, 3] uint8 file."""

    def __init__(self, pool: Pool, scenes: int, path: Path, seed: int, px: int = 64) -> None:
        self._path = path
        np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(scenes, px, px, 3))
        jobs = [(seed, chunk, px, path) for chunk in range(scenes // CHUNK)]
        self._result = pool.map_async(_picture_chunk, jobs, chunksize=1)

    def wait(self) -> NDArray[np.uint8]:
        """All pictures, when the last one is drawn."""
        self._result.get()
        return np.load(self._path, mmap_mode="r")


def held_out_pictures(count: int, px: int = 64, seed: int = 1) -> NDArray[np.uint8]:
    """Pictures [count, px, px, 3] uint8 of scenes that training never sees."""
    rng = random.Random(seed)
    drawn = [render(sample_scene(rng, held_out=True), rng, px) for _ in range(count)]
    return np.stack([np.asarray(image) for image in drawn])
