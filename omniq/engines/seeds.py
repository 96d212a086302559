"""Random numbers by seed."""

from __future__ import annotations

import torch


def seeded_generator(seed: int | None) -> torch.Generator:
    """A generator on the CPU, where a seed means the same whatever device computes; None: a seed
    that nobody knows.
    """
    generator = torch.Generator("cpu")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
