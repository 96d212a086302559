"""Qwen2.5-Omni's token2wav: codes to a mel spectrogram by flow matching, to sound by BigVGAN."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omniq.engines.base import Cancelled, NullEmit, StageInput, StageRequest
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import refuse_input
from omniq.engines.loading import check_engine_args, loading, part_folder, whole_arg
from omniq.engines.omni.speakers import Speakers
from omniq.engines.omni.vocoder import Utterance, VocoderEngine
from omniq.engines.omni.weights import part_of
from omniq.engines.omni.windows import Overlap, Sizes, Window, Windows
from omniq.engines.seeds import seeded_generator
from omniq.errors import ConfigError

NUM_STEPS, GUIDANCE_SCALE, SWAY_COEFFICIENT = 10, 0.5, -1.0
#: Of Qwen's own streaming code: blocks of the DiT's attention in a window, before it and behind it,
#: and frames of the vocoder's overlap.
BLOCKS, BLOCKS_BEFORE, BLOCKS_BEHIND, OVERLAP = 3, 2, 1, 20
#: Of the first window. A shorter one is heard sooner, but its sound ends long before the next.
FIRST_BLOCKS = BLOCKS
SAMPLE_RATE = 24_000
WARMUP_CODES = 4


@dataclass(frozen=True, slots=True)
class Flow:
    """Parameters of one utterance."""

    cond: torch.Tensor
    """[1, d]."""
    voice: torch.Tensor
    """[2, d]: the encoded reference of the voice, and that of none."""
    num_steps: int
    guidance_scale: float
    sway_coefficient: float


class Token2WavEngine(VocoderEngine):
    """Speech codes to a waveform.

    Input ``codes``: int64 [n], whole or by chunks. Output: tensor ``audio``, float32 [samples] in
    -1..1 at 24 kHz. Parameters: ``speaker``, ``seed`` (of the noise that the flow starts from),
    ``num_steps``, ``guidance_scale``, ``sway_coefficient``.

    A request that nobody streams is decoded as a whole, as transformers does it. For one that is
    streamed, codes are decoded by windows while they come, as in the model's own streaming code:
    ``window_blocks`` blocks of the DiT's attention (24 frames of 10 ms each) at once, the first
    time ``first_blocks``, with ``past_blocks`` and ``future_blocks`` beside them; sound of the last
    ``overlap`` frames waits for what follows. Every frame starts from the noise that it has in the
    whole run. Each step of the solver looks a block further than the one before, so the windows are
    an approximation; an utterance of one window is exact.

    Engine arguments: ``first_blocks``, ``window_blocks``, ``past_blocks``, ``future_blocks``,
    ``overlap``.
    """

    name = "omni-token2wav"
    sample_rate = SAMPLE_RATE

    async def load(self) -> None:
        """Load DiT, vocoder and voices.

        Raises:
            ConfigError: folder or engine arguments are wrong.
        """
        await self.in_thread(self._load)

    def _load(self) -> None:
        from transformers import (  # noqa: PLC0415 - slow import
            Qwen2_5OmniConfig,
            Qwen2_5OmniToken2WavModel,
        )

        defaults = {
            "first_blocks": FIRST_BLOCKS,
            "window_blocks": BLOCKS,
            "past_blocks": BLOCKS_BEFORE,
            "future_blocks": BLOCKS_BEHIND,
            "overlap": OVERLAP,
        }
        check_engine_args(self.stage, defaults)
        least = {"first_blocks": 1, "window_blocks": 1}
        args = {
            name: whole_arg(self.stage, name, value, least=least.get(name, 0))
            for name, value in defaults.items()
        }
        if self.stage.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"stage {self.stage.stage_id!r}: token2wav computes in float32, not in "
                f"{self.stage.dtype}"
            )
        folder = part_folder(self.stage)
        with loading(self.stage, folder):
            config = Qwen2_5OmniConfig.from_pretrained(folder).token2wav_config
            config._attn_implementation = "sdpa"
            model = Qwen2_5OmniToken2WavModel(config).float().eval()
            model.load_state_dict(part_of(folder, "token2wav."))
            self._speakers = Speakers.of_qwen2_5(folder)
        with engine_faults(f"loading {folder}"):
            model = model.to(self.device)
        self._dit: Any = model.code2wav_dit_model
        self._timbres = self._take_voices()
        self._vocoder: Any = model.code2wav_bigvgan_model
        block = int(self._dit.block_size)
        self.sizes = Sizes(
            first=args["first_blocks"] * block,
            chunk=args["window_blocks"] * block,
            past=args["past_blocks"] * block,
            future=args["future_blocks"] * block,
            overlap=args["overlap"],
        )
        self.repeats = int(self._dit.repeats)
        self.mel_size = int(self._dit.mel_dim)
        self.most_frames = int(self._dit.config.max_position_embeddings)
        self.hop = math.prod(int(rate) for rate in self._vocoder.config.upsample_rates)
        self.silence = self.hop * self.repeats

    async def warmup(self) -> None:
        """Decode a few codes."""
        codes = StageInput(tensors={"codes": torch.zeros(WARMUP_CODES, dtype=torch.int64)})
        await self.run(StageRequest("warmup", {"num_steps": 2}), {"codes": codes}, NullEmit())

    def utterance(self, request: StageRequest) -> Utterance:
        """See :class:`VocoderEngine`."""
        return _Utterance(self, request)

    async def unload(self) -> None:
        """Free the models."""
        await super().unload()
        self._dit = self._vocoder = None

    # -- on the model thread -----------------------------------------------------------------

    @torch.no_grad()
    def _take_voices(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """``cond`` and ``voice`` of :class:`Flow` for each speaker.

        The model encodes its speaker's reference anew in each evaluation, 36 times a window; here
        that is done once, and its encoder goes.
        """
        encoder = self._dit.input_embed.spk_encoder
        self._dit.input_embed.spk_encoder = torch.nn.Identity()
        timbres = {}
        for name in self._speakers.names:
            cond, mel = (value.to(self.device) for value in self._speakers.timbre(name))
            timbres[name] = cond, encoder(torch.cat([mel, torch.zeros_like(mel)]))
        return timbres

    def flow_of(self, params: Mapping[str, Any]) -> Flow:
        """A request's parameters, defaults filled in.

        Raises:
            InvalidRequest: there is no such voice.
        """
        given = {k: v for k, v in params.items() if v is not None}
        cond, voice = self._timbres[self._speakers.named(given.get("speaker"))]
        return Flow(
            cond,
            voice,
            int(given.get("num_steps", NUM_STEPS)),
            float(given.get("guidance_scale", GUIDANCE_SCALE)),
            float(given.get("sway_coefficient", SWAY_COEFFICIENT)),
        )

    @torch.no_grad()
    def mel(
        self, codes: torch.Tensor, noise: torch.Tensor, flow: Flow, cancel: threading.Event
    ) -> torch.Tensor:
        """The spectrogram [frames, mel] of ``codes`` [n], from ``noise`` [frames, mel]."""
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            codes = codes.to(self.device)
            # The talker's vocabulary is larger than the codebook; Qwen's code takes 0 for the rest.
            known = self._dit.text_embed.codec_embed.num_embeddings
            codes = codes.masked_fill(codes >= known, 0)
            made = integrate(self._dit, codes[None], noise[None].to(self.device), flow, cancel)
            return made[0].cpu()

    @torch.no_grad()
    def sound(self, mel: torch.Tensor) -> torch.Tensor:
        """float32 [frames * hop] of a spectrogram [frames, mel]."""
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            waveform: torch.Tensor = self._vocoder(mel.T[None].to(self.device))
            return waveform.reshape(-1).float().cpu()


class _Utterance(Utterance):
    """Codes to spectrogram to sound, window after window."""

    def __init__(self, engine: Token2WavEngine, request: StageRequest) -> None:
        super().__init__(1)
        self._engine, self._flow = engine, engine.flow_of(request.params)
        self._windows = Windows(engine.sizes)
        self._overlap = Overlap(engine.sizes.overlap)
        self._stream = request.stream
        # Frame by frame it gives the same numbers as all at once.
        self._noise: torch.Tensor | None = None
        self._generator = seeded_generator(request.params.get("seed"))
        self._mel: torch.Tensor | None = None

    def sounds(self, *, ended: bool) -> Iterator[torch.Tensor]:
        """See :class:`Utterance`."""
        frames = len(self.codes) * self._engine.repeats
        windows = self._windows
        if not self._stream:  # all at once
            if frames > self._engine.most_frames:
                most = self._engine.most_frames // self._engine.repeats
                refuse_input("codes", f"must be at most {most} at once, are {len(self.codes)}")
            windows = Windows(Sizes(max(frames, 1), 0, 0, 0))
        for window in windows.ready(frames, ended=ended):
            self._decode(window)
            yield from self._sound(ended=ended and window.end == frames)
        if ended:  # where no window was left
            yield from self._sound(ended=True)

    def _decode(self, window: Window) -> None:
        """More of the spectrogram."""
        engine = self._engine
        codes = self.codes[window.start // engine.repeats : window.stop // engine.repeats]
        noise = self._noise_to(window.stop)[window.start :]
        made = engine.mel(codes, noise, self._flow, self.cancel)
        new = made[window.begin - window.start : window.end - window.start]
        self._mel = new if self._mel is None else torch.cat([self._mel, new])

    def _sound(self, *, ended: bool) -> Iterator[torch.Tensor]:
        """What the spectrogram gives that has not been heard."""
        known = 0 if self._mel is None else len(self._mel)
        part = self._overlap.ready(known, ended=ended)
        if part is not None and self._mel is not None:
            wave = self._engine.sound(self._mel[part.start : part.stop])
            begin, end = ((at - part.start) * self._engine.hop for at in (part.begin, part.end))
            yield wave[begin:end].clone()

    def _noise_to(self, frames: int) -> torch.Tensor:
        """float32 [frames, mel]; what was drawn before stays."""
        have = 0 if self._noise is None else len(self._noise)
        if frames > have:
            more = torch.randn(frames - have, self._engine.mel_size, generator=self._generator)
            self._noise = more if self._noise is None else torch.cat([self._noise, more])
        assert self._noise is not None, "there are frames"
        return self._noise[:frames]


def integrate(
    dit: Any, codes: torch.Tensor, noise: torch.Tensor, flow: Flow, cancel: threading.Event
) -> torch.Tensor:
    """``Qwen2_5OmniToken2WavDiTModel.sample`` from given noise: [rows, frames, mel].

    Args:
        dit: the model, without its encoder of voices.
        codes: int64 [rows, n].
        noise: [rows, frames, mel].
        flow: parameters.
        cancel: set when nobody wants the outcome; looked at in each step.
    """
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (  # noqa: PLC0415
        RungeKutta4ODESolver,
    )

    rows = len(codes)
    guided = flow.guidance_scale >= 1e-5
    cond = flow.cond[:, None].expand(rows, noise.shape[1], -1)
    voice = flow.voice[:1].expand(rows, -1)
    if guided:  # behind each other: with the codes and the speaker, and without
        codes = torch.cat([codes, torch.zeros_like(codes)])
        cond = torch.cat([cond, torch.zeros_like(cond)])
        voice = torch.cat([voice, flow.voice[1:].expand(rows, -1)])

    def velocity(at: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        if cancel.is_set():
            raise Cancelled("nobody wants this run's outcome")
        made: torch.Tensor = dit(
            hidden_states=torch.cat([state, state]) if guided else state,
            speaker_embedding=cond,
            condition_vector=voice,
            quantized_code=codes,
            time_step=at,
            apply_cfg=False,
        )
        if not guided:
            return made
        with_codes, without = made.chunk(2)
        return with_codes + (with_codes - without) * flow.guidance_scale

    times = torch.linspace(0, 1, flow.num_steps, device=codes.device, dtype=cond.dtype)
    times += flow.sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
    solution: torch.Tensor = RungeKutta4ODESolver(velocity, noise).integrate(times)[-1]
    return solution
