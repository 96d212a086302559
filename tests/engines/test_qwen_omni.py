"""Qwen2.5-Omni in stages, compared with ``generate`` of transformers on the same weights."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omni_stages import Chunks, OmniStages, omni_stage
from qwen_omni_reference import PROMPTS, SEED, STAGES, WORDS, Reference, params, turn
from tiny_qwen_omni import SAMPLES_A_CODE, make_qwen_omni

from omniq.engines import create_engine
from omniq.engines.base import Chunk, NullEmit, StageInput, StageRequest
from omniq.engines.omni import qwen2_5
from omniq.engines.omni.reply import ReplyPart
from omniq.engines.omni.windows import Overlap, Sizes, Sound, Window, Windows
from omniq.errors import ConfigError, EngineError, InvalidRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_omni(tmp_path_factory.mktemp("omni") / "tiny-qwen2.5-omni")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture
async def staged(folder: Path) -> AsyncIterator[OmniStages]:
    async with OmniStages.loaded(folder, STAGES) as stages:
        yield stages


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS.keys())
async def test_staged_equals_generate(
    staged: OmniStages, reference: Reference, parts: list[Any]
) -> None:
    """Text tokens and speech codes are those of ``generate``, the waveform but for rounding."""
    messages = turn(*parts)
    tokens, codes, waveform = reference.answer(reference.inputs(messages), 24, 50)
    made = await staged.whole(params(), messages=messages)
    assert made["thinker"].tensors["token_ids"]["token_ids"].tolist() == tokens
    assert made["talker"].tensors["codes"]["codes"].tolist() == codes
    assert len(set(codes)) > 5
    audio = made["token2wav"].tensors["audio"]["audio"]
    assert audio.dtype is torch.float32
    assert audio.shape == waveform.shape == (len(codes) * SAMPLES_A_CODE,)
    assert waveform.std() > 0.01
    torch.testing.assert_close(audio, waveform, atol=1e-4, rtol=0)


LONG = {"min_tokens": 150}


async def test_streamed_stages_say_the_same(staged: OmniStages, reference: Reference) -> None:
    """Each stage fed by chunks of the one before: the same text and codes as one after the other.

    The waveform is as long as that of the whole run. By windows it differs from it: how much is in
    the model's card; the first window's sound is nearest, and with all that is before and behind a
    window in it nothing differs.
    """
    messages = turn(*PROMPTS["several"])
    whole = await staged.whole(params(codes=200, **LONG), messages=messages)
    made, said = await staged.streamed(params(codes=200, **LONG), messages=messages)
    tokens = made["thinker"].tensors["token_ids"]["token_ids"]
    assert tokens.equal(whole["thinker"].tensors["token_ids"]["token_ids"])
    assert "".join(said["thinker"].texts) == whole["thinker"].values["text"]
    codes = made["talker"].tensors["codes"]["codes"]
    assert codes.equal(whole["talker"].tensors["codes"]["codes"])
    assert torch.cat(said["talker"].tensors).equal(codes)
    audio = made["token2wav"].tensors["audio"]["audio"]
    assert len(said["token2wav"].tensors) > 2
    assert torch.cat(said["token2wav"].tensors).equal(audio)
    expected = whole["token2wav"].tensors["audio"]["audio"]
    assert audio.shape == expected.shape
    assert (audio - expected).std() < expected.std()


async def test_windows_that_see_all_they_depend_on_change_nothing(
    folder: Path, staged: OmniStages
) -> None:
    """Each of the four evaluations of one solver step reaches a block further ahead; what is before
    a window is kept.
    """
    codes = torch.randint(0, 64, (250,), generator=torch.Generator().manual_seed(3))
    inputs = {"codes": StageInput(tensors={"codes": codes})}
    one_step = {"seed": SEED, "num_steps": 2}
    whole = await staged.engines["token2wav"].run(
        StageRequest("whole", one_step, stream=False), inputs, NullEmit()
    )
    args = {"future_blocks": 4, "overlap": 40}
    wide = create_engine(omni_stage(folder, "token2wav", engine_args=args))
    await wide.load()
    said = Chunks("audio")
    streamed = await wide.run(StageRequest("wide", one_step, stream=True), inputs, said)
    await wide.unload()
    assert len(said.tensors) > 4
    expected = whole.tensors["audio"]["audio"]
    torch.testing.assert_close(streamed.tensors["audio"]["audio"], expected, atol=1e-5, rtol=0)


async def test_nothing_is_lost_at_the_end(folder: Path) -> None:
    """An utterance of whole windows, where nothing is looked at behind them: all of it is heard."""
    codes = torch.randint(0, 64, (36,), generator=torch.Generator().manual_seed(3))
    args = {"future_blocks": 0, "window_blocks": 1}
    engine = create_engine(omni_stage(folder, "token2wav", engine_args=args))
    await engine.load()

    async def chunks() -> AsyncIterator[Chunk]:
        for i, part in enumerate(codes.split(12)):
            yield Chunk(i, tensors={"codes": part})

    inputs = {"codes": StageInput(chunks=chunks())}
    made = await engine.run(StageRequest("all", {"seed": SEED}), inputs, Chunks("audio"))
    await engine.unload()
    assert len(made.tensors["audio"]["audio"]) == len(codes) * SAMPLES_A_CODE


async def test_a_stream_says_the_same_however_its_codes_come(staged: OmniStages) -> None:
    """Windows depend on codes, not on when they are there: a run begun anew repeats its packets."""
    codes = torch.randint(0, 64, (110,), generator=torch.Generator().manual_seed(3))

    async def packets(portion: int) -> list[torch.Tensor]:
        async def chunks() -> AsyncIterator[Chunk]:
            for i, part in enumerate(codes.split(portion)):
                yield Chunk(i, tensors={"codes": part})

        said = Chunks("audio")
        request = StageRequest("one", {"seed": SEED, "num_steps": 3}, stream=True)
        inputs = {"codes": StageInput(chunks=chunks())}
        await staged.engines["token2wav"].run(request, inputs, said)
        return said.tensors

    slowly, at_once = await packets(7), await packets(110)
    assert len(slowly) > 2
    assert torch.cat(slowly).equal(torch.cat(at_once))


async def test_the_vocoder_by_overlapping_stretches(staged: OmniStages) -> None:
    """With an overlap as wide as its filters reach, stretches give the very sound of the whole."""
    engine: Any = staged.engines["token2wav"]
    mel = torch.randn(130, 16, generator=torch.Generator().manual_seed(5))
    whole, pieces, stretches = engine.sound(mel), [], Overlap(40)
    for known in (50, 90, 130):
        part = stretches.ready(known, ended=known == 130)
        wave = engine.sound(mel[part.start : part.stop])
        pieces.append(wave[(part.begin - part.start) * 240 : (part.end - part.start) * 240])
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=0)


async def test_requests_side_by_side_are_as_alone(staged: OmniStages) -> None:
    """Several conversations at once, all stages streaming: codes and text of each as by itself."""
    asked = [turn(*parts) for parts in PROMPTS.values()]
    alone = [await staged.whole(params(codes=60, min_tokens=20), messages=m) for m in asked]
    started = time.perf_counter()
    together = await asyncio.gather(
        *(staged.streamed(params(codes=60, min_tokens=20), messages=m) for m in asked)
    )
    # There is one model thread: who waits for it is not counted as computing.
    computing = [made["token2wav"].metrics["decode_seconds"] for made, _ in together]
    assert 0 < sum(computing) < time.perf_counter() - started
    for one, (made, _) in zip(alone, together, strict=True):
        assert made["thinker"].values["text"] == one["thinker"].values["text"]
        codes = one["talker"].tensors["codes"]["codes"]
        assert made["talker"].tensors["codes"]["codes"].equal(codes)
        expected = one["token2wav"].tensors["audio"]["audio"]
        audio = made["token2wav"].tensors["audio"]["audio"]
        assert audio.shape == expected.shape


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_speaker_and_greedy_speech(
    staged: OmniStages, reference: Reference, deterministic: bool
) -> None:
    """The other voice, and the likeliest code each time."""
    messages = turn(WORDS)
    _, codes, waveform = reference.answer(
        reference.inputs(messages), 24, 40, speaker="Ethan", talker_do_sample=False
    )
    chosen = params(24, 40, speaker="ethan", temperature=0.0, deterministic=deterministic)
    chosen["token2wav"]["speaker"] = "Ethan"
    made = await staged.whole(chosen, messages=messages)
    assert made["talker"].tensors["codes"]["codes"].tolist() == codes
    audio = made["token2wav"].tensors["audio"]["audio"]
    torch.testing.assert_close(audio, waveform, atol=1e-4, rtol=0)


async def test_an_answer_without_a_word_is_a_moment_of_silence(staged: OmniStages) -> None:
    made = await staged.whole(params(tokens=1), messages=turn(WORDS))
    assert len(made["talker"].tensors["codes"]["codes"]) == 0
    audio = made["token2wav"].tensors["audio"]["audio"]
    assert audio.equal(torch.zeros(SAMPLES_A_CODE))


async def test_what_is_wrong_is_named(staged: OmniStages, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="no speaker 'Bob'; allowed: Chelsie, Ethan"):
        await staged.whole(params(speaker="Bob"), messages=turn(WORDS))
    engine = create_engine(omni_stage(folder, "token2wav", engine_args={"future_blocks": -1}))
    with pytest.raises(ConfigError, match="future_blocks must be a whole number of at least 0"):
        await engine.load()
    engine = create_engine(omni_stage(folder, "talker", engine_args={"stream_tokens": 0}))
    with pytest.raises(ConfigError, match="stream_tokens must be a whole number of at least 1"):
        await engine.load()
    for stage_id in ("thinker", "talker"):
        for wrong in (0, "long", True):
            args = {"max_model_len": wrong}
            engine = create_engine(omni_stage(folder, stage_id, engine_args=args))
            with pytest.raises(ConfigError, match="max_model_len must be a whole number of at lea"):
                await engine.load()


async def test_a_reply_of_another_thinker_is_refused(staged: OmniStages) -> None:
    """It is no answer without a word, and those in flight go on."""
    made = await staged.whole(params(), messages=turn(WORDS))
    talker, reply = staged.engines["talker"], made["thinker"].tensors["reply"]

    def say(tensors: dict[str, torch.Tensor]) -> Any:
        request = StageRequest("one", params()["talker"], stream=False)
        return talker.run(request, {"reply": StageInput(tensors=tensors)}, NullEmit())

    wrong = {
        "hidden_states must be": {"hidden_states": reply["hidden_states"][:, 1:]},
        "prompt_positions must be": {"prompt_positions": reply["prompt_positions"][:2]},
        "token_ids must be integers": {"token_ids": reply["token_ids"][None]},
    }
    for message, change in wrong.items():
        good, bad = await asyncio.gather(
            say(reply), say({**reply, **change}), return_exceptions=True
        )
        assert isinstance(bad, InvalidRequest)
        assert message in str(bad)
        assert good.tensors["codes"]["codes"].equal(made["talker"].tensors["codes"]["codes"])


async def test_rows_that_cannot_be_made_end_their_request_only(
    staged: OmniStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault while the answer is read: not taken for an answer without a word."""
    made = await staged.whole(params(), messages=turn(WORDS))
    talker, reply = staged.engines["talker"], made["thinker"].tensors["reply"]
    push, first = qwen2_5.ReplyRows.push, []

    def broken(self: qwen2_5.ReplyRows, part: ReplyPart) -> torch.Tensor:
        first.append(self)
        if self is not first[0]:
            raise RuntimeError("no memory for rows")
        return push(self, part)

    monkeypatch.setattr(qwen2_5.ReplyRows, "push", broken)
    inputs = {"reply": StageInput(tensors=reply)}
    request = StageRequest("one", params()["talker"], stream=False)
    good, bad = await asyncio.gather(
        *(talker.run(request, inputs, NullEmit()) for _ in range(2)), return_exceptions=True
    )
    assert isinstance(bad, EngineError)
    assert "no memory for rows" in str(bad)
    assert not isinstance(good, BaseException)
    assert good.tensors["codes"]["codes"].equal(made["talker"].tensors["codes"]["codes"])


async def test_a_request_cancelled_in_its_first_pass_leaves_nothing(
    staged: OmniStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's states go with it, although the pass goes on to its end."""
    thinker: Any = staged.engines["thinker"]
    begun, go_on, kept = threading.Event(), threading.Event(), []
    forward = thinker._forward

    def slow(*args: Any, **more: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return forward(*args, **more)

    def done(generation: Any, out: Any) -> None:
        type(thinker)._prompt_done(thinker, generation, out)
        kept.append(weakref.ref(generation.prompt_states))

    monkeypatch.setattr(thinker, "_forward", slow)
    monkeypatch.setattr(thinker, "_prompt_done", done)
    inputs = {"messages": StageInput(turn(WORDS))}
    request = StageRequest("gone", params()["thinker"])
    going = asyncio.create_task(thinker.run(request, inputs, NullEmit()))
    await asyncio.to_thread(begun.wait, 30)
    going.cancel()
    await asyncio.wait([going])
    go_on.set()
    await thinker._steps
    del going
    gc.collect()
    assert [ref() for ref in kept] == [None]


def test_reply_rows_come_when_the_next_token_is_there() -> None:
    """Row i: embedding of token i plus the state behind it, however the answer is cut."""
    table = torch.arange(20.0)[:, None].repeat(1, 2)
    tokens = qwen2_5.Tokens((), 18, 19, 0, 1, 2, 3)
    ids, states = torch.tensor([4, 7, 5, 9]), torch.arange(4.0)[:, None].repeat(1, 2) / 10
    expected = table[ids[:-1]] + states[1:]
    for cuts in ([4], [1, 3], [1, 1, 1, 1], [2, 2]):
        rows = qwen2_5.ReplyRows(lambda i: table[i], tokens)
        parts = zip(ids.split(cuts), states.split(cuts), strict=True)
        assert torch.cat([rows.push(ReplyPart(i, s)) for i, s in parts]).equal(expected)
        assert rows.end().equal(table[[18, 19]])


def test_windows_of_the_models_own_streaming_code() -> None:
    """Sizes of Qwen's code: 72 frames at once, 24 behind; the last takes the rest."""
    windows = Windows(Sizes(chunk=72, future=24, overlap=20))
    assert list(windows.ready(94, ended=False)) == []
    assert list(windows.ready(96, ended=False)) == [Window(0, 72, 96)]
    assert list(windows.ready(166, ended=False)) == []
    assert list(windows.ready(250, ended=False)) == [Window(72, 144, 168), Window(144, 216, 240)]
    assert list(windows.ready(250, ended=True)) == [Window(216, 250, 250, rest=True)]
    growing = Windows(Sizes(chunk=72, future=24, overlap=20, first=24))
    assert list(growing.ready(47, ended=False)) == []
    assert list(growing.ready(168, ended=False)) == [
        Window(0, 24, 48),
        Window(24, 72, 96),
        Window(72, 144, 168),
    ]
    overlap = Overlap(20)
    assert overlap.ready(72, ended=False) == Sound(0, 72, 0, 52)
    assert overlap.ready(144, ended=False) == Sound(32, 144, 52, 124)
    assert overlap.ready(150, ended=True) == Sound(104, 150, 124, 150)
