"""Trains the autoencoder: AutoencoderKL, factor 8, 16 latent channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiny_omni.dataset import held_out_pictures
from tiny_omni.training import Average, Budget, Progress, Trainer

KL_WEIGHT = 1e-3


def new_vae() -> Any:
    """An untrained autoencoder with the latent geometry of the Z-Image and FLUX families."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[24, 32, 64, 80],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
        sample_size=64,
    )


def load_vae(folder: Path, device: str) -> Any:
    """The trained autoencoder of a model folder, in float32."""
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(folder / "vae", dtype=torch.float32).eval().to(device)


def to_input(pictures: Tensor) -> Tensor:
    """[B, H, W, 3] uint8 -> [B, 3, H, W] float32 in -1..1."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


def _gradient_error(a: Tensor, b: Tensor) -> Tensor:
    d = a - b
    return d.diff(dim=-1).abs().mean() + d.diff(dim=-2).abs().mean()


def _loss(vae: Any, pictures: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Absolute error of pixels and edges, plus a light pull to a unit Gaussian latent."""
    device = pictures.device
    x = to_input(pictures[torch.randint(len(pictures), (batch,), device=device)])
    with torch.autocast(
        device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
    ):
        posterior = vae.encode(x).latent_dist
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        y = vae.decode(z).sample.float()
    error = (y - x).abs().mean()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return error + 0.5 * _gradient_error(y, x) + KL_WEIGHT * kl, error


@torch.no_grad()
def encode(vae: Any, pictures: Tensor, batch: int = 2048) -> Tensor:
    """Unscaled latents [N, 16, H/8, W/8] float32 of uint8 pictures [N, H, W, 3]."""
    parts = pictures.split(batch)
    return torch.cat([vae.encode(to_input(part)).latent_dist.mode() for part in parts])


@torch.no_grad()
def psnr(vae: Any, pictures: Tensor) -> float:
    """Mean peak signal-to-noise ratio, in dB, of reconstructed pictures."""
    y = vae.decode(encode(vae, pictures)).sample.clamp(-1, 1)
    error = (y - to_input(pictures)).square().mean(dim=(1, 2, 3)) / 4
    return float((-10 * torch.log10(error)).mean())


def train_vae(
    folder: Path, pictures: NDArray[np.uint8], device: str, budget: Budget, batch: int = 256
) -> None:
    """Train and save `folder/vae` (float16) with its latent scale and shift."""
    torch.manual_seed(0)
    progress = Progress("vae")
    data = torch.from_numpy(np.array(pictures)).to(device)
    vae = new_vae().to(device, memory_format=torch.channels_last).train()
    average = Average(vae)
    trainer = Trainer([vae], lambda: _loss(vae, data, batch), device=device, lr=2e-3)
    progress.say("ready")
    step = 0
    for step, share in budget.run(device):
        trainer.step(step, share)
        average.update(step)
        progress.tick(step, share, trainer)
    average.apply()
    vae.eval()
    latents = encode(vae, data[:4096])
    vae.register_to_config(
        scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item()
    )
    vae.to("cpu", memory_format=torch.contiguous_format).half().save_pretrained(folder / "vae")
    saved = load_vae(folder, device)
    held_out = torch.from_numpy(held_out_pictures(512)).to(device)
    progress.say(
        f"{step + 1} steps of {batch}, {saved.num_parameters()} parameters, "
        f"held-out PSNR {psnr(saved, held_out):.2f} dB, channel std "
        f"{(latents.std(dim=(0, 2, 3)) / latents.std()).tolist()}"
    )
