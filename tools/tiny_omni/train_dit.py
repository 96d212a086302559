"""Trains the DiT: a Z-Image transformer, rectified flow, conditioned on the LM's hidden rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tiny_omni.dataset import MAX_ROWS, TextTable
from tiny_omni.dit_forward import BatchedForward
from tiny_omni.train_lm import load_model
from tiny_omni.train_vae import encode, load_vae
from tiny_omni.training import Average, Budget, Progress, Trainer

CONDITION_DROPOUT = 0.1
ROW_NOISE = 0.02
"""Noise on the rows, in units of their spread: serving may run the LM in bfloat16."""


def new_transformer(hidden: int, dim: int = 128, layers: int = 6) -> Any:
    """An untrained transformer; gates and output start at zero, as is usual for DiTs."""
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=dim,
        n_layers=layers,
        n_refiner_layers=1,
        n_heads=dim // 64,
        n_kv_heads=dim // 64,
        qk_norm=True,
        cap_feat_dim=hidden,
        axes_dims=[16, 24, 24],
        axes_lens=[512, 64, 64],
    )
    for name, parameter in model.named_parameters():
        if "adaLN" in name or ("final_layer" in name and "linear" in name):
            torch.nn.init.zeros_(parameter)
        elif "pad_token" in name:
            torch.nn.init.normal_(parameter, std=0.02)
        elif parameter.dim() == 2:
            torch.nn.init.xavier_uniform_(parameter)
    return model


def load_transformer(folder: Path) -> Any:
    """The trained transformer of a model folder, in float32 on the CPU."""
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel.from_pretrained(folder / "transformer", dtype=torch.float32)


@torch.no_grad()
def caption_rows(folder: Path, texts: TextTable, device: str, batch: int = 4096) -> Tensor:
    """Teacher-forced hidden rows of every caption, [N * K, MAX_ROWS, hidden] float16.

    Row i of a caption is the final-norm hidden state at the position that predicts its token i,
    as the AR stage hands it on. Rows past the caption's length are zero.
    """
    model = load_model(folder).to(device)
    longest = int((texts.start + texts.length).max()) + 1
    tokens = torch.from_numpy(texts.tokens[:, :longest])
    start = torch.from_numpy(texts.start).long()
    length = torch.from_numpy(texts.length).long()
    row = torch.arange(MAX_ROWS)
    parts = []
    for i in range(0, len(tokens), batch):
        hidden = model.model(input_ids=tokens[i : i + batch].to(device).long()).last_hidden_state
        at = (start[i : i + batch, None] + row).clamp(max=longest - 1).to(device)
        picked = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        real = (row < length[i : i + batch, None]).to(device)
        parts.append((picked * real[..., None]).half())
    return torch.cat(parts)


@torch.no_grad()
def scaled_latents(folder: Path, pictures: NDArray[np.uint8], device: str) -> Tensor:
    """Latents [N, 16, h, w] float16 of all pictures, with zero mean and unit spread."""
    vae = load_vae(folder, device)
    parts = []
    for i in range(0, len(pictures), 8192):
        z = encode(vae, torch.from_numpy(np.array(pictures[i : i + 8192])).to(device))
        parts.append(((z - vae.config.shift_factor) * vae.config.scaling_factor).half())
    return torch.cat(parts)


class _Loss:
    """Draws noisy latents with their captions and computes the error of the velocity."""

    def __init__(
        self, forward: BatchedForward, latents: Tensor, rows: Tensor, lengths: Tensor, batch: int
    ) -> None:
        self._forward, self._batch = forward, batch
        self._latents, self._rows, self._lengths = latents, rows, lengths
        self._per_picture = len(rows) // len(latents)
        self._noise = ROW_NOISE * float(rows[:4096, :8].float().std())

    def __call__(self) -> tuple[Tensor, Tensor]:
        size, device = self._batch, self._latents.device
        pick = torch.randint(len(self._rows), (size,), device=device)
        rows, lengths = self._rows[pick].float(), self._lengths[pick]
        rows = rows + self._noise * torch.randn_like(rows)
        drop = torch.rand(size, device=device) < CONDITION_DROPOUT
        rows = rows.masked_fill(drop[:, None, None], 0.0)  # unconditional: one row of zeros
        lengths = lengths.masked_fill(drop, 1)
        picture = self._latents[pick // self._per_picture].float()
        noise = torch.randn_like(picture)
        sigma = torch.sigmoid(0.3 + 1.2 * torch.randn(size, device=device))
        mix = sigma[:, None, None, None]
        noisy = (1 - mix) * picture + mix * noise
        with torch.autocast(
            device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
        ):
            velocity = self._forward(noisy, 1 - sigma, rows, lengths)
        loss = F.mse_loss(velocity.float(), picture - noise)
        return loss, loss


def train_dit(
    folder: Path,
    texts: TextTable,
    pictures: NDArray[np.uint8],
    device: str,
    budget: Budget,
    *,
    batch: int = 1024,
    resume: bool = False,
    lr: float = 2e-3,
) -> None:
    """Train and save `folder/transformer` (float16) and `folder/scheduler`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    torch.manual_seed(0)
    progress = Progress("dit")
    rows = caption_rows(folder, texts, device)
    latents = scaled_latents(folder, pictures, device)
    progress.say(f"rows {list(rows.shape)}, latents {list(latents.shape)}")
    model = load_transformer(folder) if resume else new_transformer(rows.shape[-1])
    model = model.to(device).train()
    forward = BatchedForward(model, latents.shape[2], latents.shape[3], device)
    lengths = torch.from_numpy(texts.length).to(device).long()
    average = Average(model, decay=0.9995)
    loss = _Loss(forward, latents, rows, lengths, batch)
    trainer = Trainer([model], loss, device=device, lr=lr)
    progress.say("ready")
    step = 0
    for step, share in budget.run(device):
        trainer.step(step, share)
        average.update(step)
        progress.tick(step, share, trainer)
    average.apply()
    model.cpu().half().save_pretrained(folder / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")
    progress.say(f"{step + 1} steps of {batch}, {model.num_parameters()} parameters")
