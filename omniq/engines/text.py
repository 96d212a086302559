"""Text in and out of an AR engine: chat template, context limit, incremental decoding, stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omniq.errors import ConfigError, InvalidRequest

_INCOMPLETE = "\ufffd"


class PromptEncoder:
    """Prompts to token ids; not thread-safe, as tokenizers are not."""

    def __init__(self, folder: Path, *, chat_template: bool) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow import, first engine pays

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._chat = chat_template
        if chat_template and not self.tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer in {folder} has no chat template; "
                "set engine_args {chat_template: false} to pass prompts as they are"
            )

    def encode(self, prompt: str, context: int) -> list[int]:
        """Token ids of ``prompt``, as one user turn that the model is to answer.

        Raises:
            InvalidRequest: they leave no room for an answer in ``context`` positions.
        """
        if self._chat:
            turns = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(prompt)["input_ids"]
        if not ids or len(ids) >= context:
            message = f"must have 1 to {context - 1} tokens for this model, has {len(ids)}"
            raise InvalidRequest(
                f"prompt: {message}", fields=[{"field": "input.prompt", "message": message}]
            )
        return list(ids)


class TextStream:
    """Decodes tokens one by one into pieces whose concatenation is the final text.

    A piece is held back while it ends inside a UTF-8 character, or while it may turn out to be the
    beginning of a stop string. Text from a stop string on is never given out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._ids: list[int] = []
        # Ids before `_prefix` are context no longer needed; those before `_read` are decoded.
        self._prefix = self._read = 0
        self._decoded = ""
        self._given = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All pieces given out so far."""
        return self._decoded[: self._given]

    def push(self, token: int) -> str:
        """The piece that ``token`` completes, maybe empty; sets ``stopped`` at a stop string."""
        self._ids.append(token)
        searched = len(self._decoded) - self._hold
        self._decode(final=False)
        return self._release(max(searched, 0), self._hold)

    def finish(self) -> str:
        """What was held back, at the end of generation."""
        if self.stopped:
            return ""
        searched = len(self._decoded) - self._hold
        self._decode(final=True)
        return self._release(max(searched, 0), 0)

    def _decode(self, *, final: bool) -> None:
        before = self._text_of(self._ids[self._prefix : self._read])
        after = self._text_of(self._ids[self._prefix :])
        if len(after) > len(before) and (final or not after.endswith(_INCOMPLETE)):
            self._decoded += after[len(before) :]
            self._prefix, self._read = self._read, len(self._ids)

    def _text_of(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _release(self, search_from: int, hold: int) -> str:
        found = [self._decoded.find(s, search_from) for s in self._stop]
        if hits := [at for at in found if at >= 0]:
            self.stopped = True
            end = min(hits)
        else:
            end = max(len(self._decoded) - hold, self._given)
        piece = self._decoded[self._given : end]
        self._given = max(self._given, end)
        return piece
