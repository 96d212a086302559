"""Qwen3-Omni's talker and code predictor, and what each of their forward passes gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omniq.engines.inputs import refuse_input
from omniq.engines.omni import qwen3, reply
from omniq.engines.omni.reply import ThinkerPrompt
from omniq.engines.omni.speakers import Speakers
from omniq.engines.omni.talker import Talker, TalkerPrompt, TalkerReply, TalkerStep
from omniq.engines.omni.weights import Rows, load_part
from omniq.engines.sampling import Sampler, Sampling

#: Codes at the vocabulary's end that are never drawn, but for the end of speech.
SPECIAL = 1024
#: Of the code predictor, as ``prepare_inputs_for_generation`` of the reference has them.
PREDICTOR = Sampling(temperature=1.0, top_k=50, top_p=0.8)


class Qwen3Talker(Talker):
    """``Qwen3OmniMoeTalkerForConditionalGeneration``: the first code of a frame a step, the rest of
    it by the code predictor.
    """

    def __init__(self, folder: Path, device: str, **options: Any) -> None:
        from transformers import Qwen3OmniMoeConfig  # noqa: PLC0415 - slow import

        self._talker = _talker_of(folder, **options).to(device).eval()
        self._predictor = self._talker.code_predictor
        self.model, self.config = self._talker.model, self._talker.config.text_config
        whole = Qwen3OmniMoeConfig.from_pretrained(folder)
        talker = self._talker.config
        self._speaker_ids = {name: int(i) for name, i in talker.speaker_id.items()}
        self.speakers = Speakers(self._speaker_ids, ("ethan",))
        self._tokens = tokens_of(whole)
        self.thinker_size = int(talker.thinker_hidden_size)
        tokens = self._tokens
        self.example = (tokens.im_start, tokens.user, 0, tokens.im_start, tokens.assistant, 0)
        self.ends, self.seen = (talker.codec_eos_token_id,), ()
        self.groups = int(talker.num_code_groups)
        self._embed = Rows(folder, "thinker.model.embed_tokens.weight", self._talker.dtype, device)

    def prompt(self, prompt: ThinkerPrompt, first: torch.Tensor, speaker: str) -> TalkerPrompt:
        """See :class:`Talker`."""
        tokens, device = self._tokens, self._talker.device
        start = qwen3.assistant_start(prompt.ids, tokens)
        if start is None or start + qwen3.HEAD > len(prompt.ids):
            refuse_input(reply.NAME, "the prompt does not end with the head of an answer")
        users = qwen3.user_rows(prompt, self._text, self._hidden, tokens)
        codes = list(tokens.codec)
        codes.insert(3, self._speaker_ids[speaker])
        codec = self._talker.get_input_embeddings()(torch.tensor(codes, device=device))
        head = self._text(prompt.ids[start : start + qwen3.HEAD])
        answer = qwen3.assistant_rows(head, self._text, codec, first, tokens)
        positions = qwen3.positions(prompt, len(answer), tokens)
        return TalkerPrompt(torch.cat([users, answer]), positions)

    def reply(self) -> TalkerReply:
        """See :class:`Talker`."""
        return qwen3.ReplyRows(self._text, self._tokens)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`Talker`; the codec's own words are never drawn."""
        logits = self._talker.codec_head(states).float()
        end = self.ends[0]
        kept = logits[..., end].clone()
        logits[..., -SPECIAL:] = -torch.inf
        logits[..., end] = kept
        return logits

    def step(self, steps: list[TalkerStep]) -> tuple[torch.Tensor, list[list[int]]]:
        """See :class:`Talker`: the rest of each frame, one code group after the other."""
        from transformers import DynamicCache  # noqa: PLC0415 - slow import, done by load

        device = self._talker.device
        frames = [[s.code] for s in steps]
        samplers = [self._sampler(s.sampler) for s in steps]
        first = self._talker.get_input_embeddings()(
            torch.tensor([s.code for s in steps], device=device)
        )
        total, embeds = first, torch.stack([torch.stack([s.state for s in steps]), first], 1)
        cache = DynamicCache(config=self._predictor.config)
        for group in range(self.groups - 1):
            out = self._predictor.model(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
            logits = self._predictor.lm_head[group](out.last_hidden_state[:, -1])
            codes = [sampler.pick(row) for sampler, row in zip(samplers, logits, strict=True)]
            for frame, code in zip(frames, codes, strict=True):
                frame.append(code)
            made = self._predictor.get_input_embeddings()[group](torch.tensor(codes, device=device))
            total, embeds = total + made, made[:, None]
        return total + torch.cat([s.row for s in steps]), frames

    def _sampler(self, of_talker: Sampler) -> Sampler:
        """Draws from the request's own generator; greedy where the talker is."""
        chosen = Sampling(temperature=0.0) if of_talker.sampling.greedy else PREDICTOR
        return Sampler(chosen, (), generator=of_talker.generator)

    def _text(self, ids: torch.Tensor) -> torch.Tensor:
        return self._talker.text_projection(self._embed(ids))

    def _hidden(self, states: torch.Tensor) -> torch.Tensor:
        return self._talker.hidden_projection(states.to(self._talker.device, self._talker.dtype))


def _talker_of(folder: Path, **options: Any) -> Any:
    """The talker of the model in ``folder``, loaded as a part of the whole: transformers knows how
    to join the weights of experts for that one only.
    """
    from transformers import Qwen3OmniMoeConfig  # noqa: PLC0415 - slow import
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (  # noqa: PLC0415
        Qwen3OmniMoePreTrainedModel,
        Qwen3OmniMoeTalkerForConditionalGeneration,
    )

    class Part(Qwen3OmniMoePreTrainedModel):
        __module__ = Qwen3OmniMoePreTrainedModel.__module__  # see load_part
        config_class = Qwen3OmniMoeConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            talker = config.talker_config
            self.talker = Qwen3OmniMoeTalkerForConditionalGeneration._from_config(talker)
            self.post_init()

    return load_part(Part, folder, "talker", **options).talker


def tokens_of(config: Any) -> qwen3.Tokens:
    """The ids that the glue needs, of the whole model's configuration."""
    thinker, talker = config.thinker_config, config.talker_config
    return qwen3.Tokens(
        media=(thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id),
        im_start=config.im_start_token_id,
        user=config.user_token_id,
        assistant=config.assistant_token_id,
        tts_bos=config.tts_bos_token_id,
        tts_eos=config.tts_eos_token_id,
        tts_pad=config.tts_pad_token_id,
        codec=(
            talker.codec_nothink_id,
            talker.codec_think_bos_id,
            talker.codec_think_eos_id,
            talker.codec_pad_id,
            talker.codec_bos_id,
        ),
    )
