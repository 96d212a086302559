"""CSM staged (AR, codec) against ``CsmForConditionalGeneration.generate`` on the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import Recorder, ask, loaded
from tiny_csm import CODEBOOKS, CODES, FRAME, make_csm

from omniq.config import OmniStageConfig
from omniq.engines import create_engine
from omniq.engines.base import Chunk, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.batch_cache import BatchCache
from omniq.engines.codec import load_codec
from omniq.engines.families.csm import ends, is_sound, portions
from omniq.engines.mimi_stream import MimiStream, receptive_positions
from omniq.engines.sampling import Sampler
from omniq.errors import ConfigError, EngineError, InvalidRequest

TEXT = "hello there"
#: Floats this close are equal but for rounding; waveforms reach to 1.
CLOSE = {"atol": 2e-6, "rtol": 0}
SOUND = torch.sin(torch.arange(3 * FRAME) / 20.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model by its settings, made once."""
    folders: dict[str, Path] = {}

    def get(**settings: Any) -> Path:
        name = repr(settings)
        if name not in folders:
            folders[name] = make_csm(tmp_path_factory.mktemp("csm"), **settings)
        return folders[name]

    return get


@pytest.fixture
async def ar(made: Callable[..., Path]) -> AsyncIterator[Engine]:
    engine = await loaded(ar_stage(made()))
    yield engine
    await engine.unload()


@pytest.fixture
async def codec(made: Callable[..., Path]) -> AsyncIterator[Engine]:
    engine = await loaded(decode_stage(made()))
    yield engine
    await engine.unload()


def ar_stage(model: Path, **more: Any) -> OmniStageConfig:
    return OmniStageConfig.model_validate(
        {
            "stage_id": "ar", "engine_type": "AR", "engine": "csm", "model": str(model),
            "dtype": "float32", "max_in_flight": 8, **more,
        }
    )  # fmt: skip


def decode_stage(model: Path, **more: Any) -> OmniStageConfig:
    return OmniStageConfig.model_validate(
        {
            "stage_id": "vocoder", "engine_type": "decode", "engine": "codec",
            "model": str(model), "dtype": "float32", "max_in_flight": 8, **more,
        }
    )  # fmt: skip


def reference(
    model: Path,
    text: str,
    voice: str = "0",
    *,
    seed: int = 0,
    audio: tuple[str, Any] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes [frames, codebooks] and samples of ``generate``."""
    from transformers import AutoProcessor, CsmForConditionalGeneration

    whole = CsmForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(model)
    messages = []
    if audio is not None:
        words, samples = audio
        said = [{"type": "text", "text": words}, {"type": "audio", "path": samples}]
        messages.append({"role": voice, "content": said})
    messages.append({"role": voice, "content": [{"type": "text", "text": text}]})
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )
    torch.manual_seed(seed)
    out = whole.generate(**inputs, **options, output_audio=True, return_dict_in_generate=True)
    return out.sequences[0], out.audio[0]


def codes_of(out: StageOutput) -> torch.Tensor:
    return out.tensors["codes"]["codes"]


def audio_of(out: StageOutput) -> torch.Tensor:
    return out.tensors["audio"]["audio"]


@pytest.mark.parametrize("seed", [0, 5])
async def test_codes_and_sound_equal_generate(
    made: Callable[..., Path], ar: Engine, codec: Engine, seed: int
) -> None:
    """Sampling as the model's generation config has it; the codec's samples are the model's."""
    out = await ask(ar, {"seed": seed}, prompt=TEXT)
    expected, samples = reference(made(), TEXT, seed=seed)
    assert torch.equal(codes_of(out), expected)
    assert out.values["finish_reason"] == "length"
    spoken = await ask(codec, {}, codes=codes_of(out))
    assert samples is not None
    assert audio_of(spoken).shape == (len(expected) * FRAME,)
    assert audio_of(spoken).dtype == torch.float32
    torch.testing.assert_close(audio_of(spoken), samples, **CLOSE)


async def test_greedy_equals_generate(made: Callable[..., Path], ar: Engine) -> None:
    """By parameter, and where the model's own configuration does not sample."""
    greedy = {"do_sample": False, "depth_decoder_do_sample": False}
    expected, _ = reference(made(), TEXT, "1", max_new_tokens=20, **greedy)
    out = await ask(ar, {"temperature": 0.0, "max_tokens": 20}, prompt=TEXT, voice="1")
    assert torch.equal(codes_of(out), expected)
    folder = made(sample=False)
    engine = await loaded(ar_stage(folder))
    plain, _ = reference(folder, TEXT)
    assert torch.equal(codes_of(await ask(engine, {}, prompt=TEXT)), plain)
    await engine.unload()


async def test_parameters_reach_both_decoders(made: Callable[..., Path], ar: Engine) -> None:
    """A request's sampling holds for all codes of a frame."""
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.7}
    depth = {f"depth_decoder_{name}": value for name, value in options.items()}
    expected, _ = reference(made(), TEXT, seed=2, **options, **depth)
    assert torch.equal(codes_of(await ask(ar, {"seed": 2, **options}, prompt=TEXT)), expected)


async def test_voice_and_text_matter(ar: Engine) -> None:
    """Else the tests above compare nothing of them."""
    base = codes_of(await ask(ar, {"seed": 1}, prompt=TEXT))
    assert not torch.equal(base, codes_of(await ask(ar, {"seed": 1}, prompt="good bye")))
    assert not torch.equal(base, codes_of(await ask(ar, {"seed": 1}, prompt=TEXT, voice="3")))


async def test_recording_of_a_voice_equals_generate(made: Callable[..., Path], ar: Engine) -> None:
    """A recording and its words stand before the text."""
    expected, _ = reference(made(), TEXT, seed=4, audio=("a red circle", SOUND.numpy()))
    out = await ask(ar, {"seed": 4}, prompt=TEXT, ref_audio=SOUND, ref_text="a red circle")
    assert torch.equal(codes_of(out), expected)
    assert not torch.equal(codes_of(await ask(ar, {"seed": 4}, prompt=TEXT)), expected)


async def test_half_precision(made: Callable[..., Path]) -> None:
    """A recording is heard, and codes are decoded, in the stage's dtype; sound is float32."""
    ar = await loaded(ar_stage(made(), dtype="bfloat16"))
    codec = await loaded(decode_stage(made(), dtype="bfloat16"))
    out = await ask(ar, {"seed": 4}, prompt=TEXT, ref_audio=SOUND, ref_text="a")
    audio = audio_of(await ask(codec, {}, codes=codes_of(out)))
    assert (audio.dtype, audio.shape) == (torch.float32, (12 * FRAME,))


async def test_together_equals_alone(ar: Engine) -> None:
    """Texts of several lengths in flight at once, one pass a step."""
    texts = [TEXT, "a", "a red circle above a blue square", "good bye"]
    alone = [codes_of(await ask(ar, {"seed": i}, prompt=t)) for i, t in enumerate(texts)]
    passes = []
    forward = ar._forward
    ar._forward = lambda rows, **inputs: (passes.append(len(rows)), forward(rows, **inputs))
    together = await asyncio.gather(*(ask(ar, {"seed": i}, prompt=t) for i, t in enumerate(texts)))
    ar._forward = forward
    for out, expected in zip(together, alone, strict=True):
        assert torch.equal(codes_of(out), expected)
    assert max(passes) == len(texts)


async def test_end_frame_stops_and_is_not_sound(made: Callable[..., Path]) -> None:
    """As ``generate`` stops; what comes behind the sound is cut off."""
    folder = made(codebooks=2)
    engine = await loaded(ar_stage(folder))
    ended = 0
    for seed in range(6):
        params = {"seed": seed, "max_tokens": 60}
        expected, samples = reference(folder, TEXT, seed=seed, max_new_tokens=60)
        kept = Recorder()
        request = StageRequest("test", params)
        out = await engine.run(request, {"prompt": StageInput(TEXT)}, kept)
        codes = codes_of(out)
        assert torch.equal(codes, expected[: len(codes)])
        assert torch.equal(torch.cat(kept.chunks), codes)
        assert samples is not None
        assert len(samples) == len(codes) * FRAME
        if out.values["finish_reason"] == "stop":
            ended += 1
            assert len(codes) in (len(expected), len(expected) - 1)
    assert ended, "no seed came to an end"
    await engine.unload()


async def test_frames_go_on_while_more_are_made(made: Callable[..., Path]) -> None:
    """In portions of ``chunk_frames``, the first long before the last frame."""
    engine = await loaded(ar_stage(made(), engine_args={"chunk_frames": 3}))
    seen: list[int] = []

    class Counting(Recorder):
        async def achunk(self, *args: Any, **more: Any) -> None:
            seen.append(len(self.steps))
            await super().achunk(*args, **more)

    kept = Counting()
    request = StageRequest("test", {"seed": 1, "max_tokens": 14})
    out = await engine.run(request, {"prompt": StageInput(TEXT)}, kept)
    assert [len(c) for c in kept.chunks] == [3, 3, 3, 3, 2]
    assert torch.equal(torch.cat(kept.chunks), codes_of(out))
    assert seen[0] < 14
    await engine.unload()


async def test_slow_reader_holds_up_nobody(ar: Engine) -> None:
    """A request whose chunks are not taken ends behind another that came later."""
    gate = asyncio.Event()

    class Slow(NullEmit):
        async def achunk(self, *_: Any, **__: Any) -> None:
            await gate.wait()

    inputs = {"prompt": StageInput(TEXT)}
    slow = asyncio.create_task(ar.run(StageRequest("slow", {"seed": 1}), inputs, Slow()))
    await ask(ar, {"seed": 2}, prompt="good bye")
    assert not slow.done()
    gate.set()
    assert torch.equal(codes_of(await slow), codes_of(await ask(ar, {"seed": 1}, prompt=TEXT)))


async def test_cancelled_speech_leaves_the_others_alone(ar: Engine) -> None:
    """Within a step."""
    expected = codes_of(await ask(ar, {"seed": 1, "max_tokens": 60}, prompt=TEXT))
    kept, most = Recorder(), {"max_tokens": 200}
    inputs = {"prompt": StageInput("a red circle")}
    going = asyncio.create_task(ar.run(StageRequest("one", {"seed": 3, **most}), inputs, kept))
    other = asyncio.create_task(ask(ar, {"seed": 1, "max_tokens": 60}, prompt=TEXT))
    while len(kept.steps) < 4:
        await asyncio.sleep(0.001)
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert torch.equal(codes_of(await other), expected)
    assert len(kept.steps) < 200


async def test_a_step_that_breaks_ends_its_requests_only(
    ar: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that cannot be joined: whoever was in the step hears of it, and the next are served."""
    expected = codes_of(await ask(ar, {"seed": 1}, prompt=TEXT))

    def broken(*_: Any) -> None:
        raise RuntimeError("no room for two")

    kept = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(BatchCache, "join", broken)
        first = asyncio.create_task(ask(ar, {"max_tokens": 200}, kept, prompt="a red circle"))
        while not kept.steps:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(ask(ar, {"max_tokens": 200}, prompt=TEXT))
        async with asyncio.timeout(30):
            faults = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(fault) for fault in faults] == [EngineError, EngineError]
    assert "no room for two" in str(faults[1])
    assert torch.equal(codes_of(await ask(ar, {"seed": 1}, prompt=TEXT)), expected)


async def test_nan_of_one_row_is_its_own(ar: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of the pass say what they say alone."""
    expected = codes_of(await ask(ar, {"seed": 1, "max_tokens": 60}, prompt=TEXT))
    pick = Sampler.pick

    def poisoned(self: Sampler, logits: torch.Tensor) -> int:
        if self.sampling.seed == 3 and self._made.total() > 8:
            logits = torch.full_like(logits, torch.nan)
        return pick(self, logits)

    monkeypatch.setattr(Sampler, "pick", poisoned)
    made = await asyncio.gather(
        ask(ar, {"seed": 3, "max_tokens": 60}, prompt="a red circle"),
        ask(ar, {"seed": 1, "max_tokens": 60}, prompt=TEXT),
        return_exceptions=True,
    )
    assert isinstance(made[0], EngineError)
    assert not isinstance(made[1], BaseException)
    assert torch.equal(codes_of(made[1]), expected)


@pytest.mark.parametrize(
    ("params", "inputs", "field"),
    [
        ({"stop": ["x"]}, {"prompt": "a"}, "parameters.stop"),
        ({"repetition_penalty": 1.2}, {"prompt": "a"}, "parameters.repetition_penalty"),
        ({}, {"prompt": "a", "voice": "alloy"}, "input.voice"),
        ({}, {"prompt": "a" * 600}, "input.prompt"),
        ({}, {"voice": "1"}, "input.prompt"),
        ({}, {"prompt": "a", "ref_text": "b"}, "input.ref_audio"),
        ({}, {"prompt": "a", "ref_text": "b" * 600, "ref_audio": SOUND}, "input.ref_audio"),
    ],
)
async def test_wrong_requests(
    ar: Engine, params: dict[str, Any], inputs: dict[str, Any], field: str
) -> None:
    """Refused before anything is made, by name."""
    with pytest.raises(InvalidRequest) as refused:
        await ask(ar, params, **inputs)
    assert [f["field"] for f in refused.value.fields] == [field]


# -- the codec ---------------------------------------------------------------------------------


def some_codes(frames: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CODES, (frames, CODEBOOKS), generator=generator)


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [4] * 10, [3, 1, 17, 19]], ids=len)
async def test_pieces_are_the_whole(
    made: Callable[..., Path], codec: Engine, sizes: list[int]
) -> None:
    """Over more frames than the codec's window; every piece as long as its frames."""
    codes = some_codes(sum(sizes))
    whole = load_codec(made(), torch.float32).decode(codes.T[None]).audio_values[0, 0]

    async def chunks() -> AsyncIterator[Chunk]:
        for i, part in enumerate(codes.split(sizes)):
            yield Chunk(i, tensors={"codes": part})

    kept = Recorder()
    inputs = {"codes": StageInput(chunks=chunks())}
    out = await codec.run(StageRequest("test", {}), inputs, kept)
    assert [len(c) for c in kept.chunks] == [n * FRAME for n in sizes]
    assert torch.equal(torch.cat(kept.chunks), audio_of(out))
    torch.testing.assert_close(audio_of(out), whole.detach(), **CLOSE)


def test_looks_back_no_less_than_needed(made: Callable[..., Path]) -> None:
    """One position less, and pieces differ from the whole."""
    codec = load_codec(made(), torch.float32)
    codes = some_codes(12)
    whole = codec.decode(codes.T[None]).audio_values[0].detach()
    errors = []
    for less in (0, 1):
        stream = MimiStream(codec)
        stream._look_back = receptive_positions(codec.decoder) - less
        made_so = torch.cat([stream.push(part) for part in codes.split(3)], dim=1)
        errors.append((made_so - whole).abs().max().item())
    assert errors[0] < 2e-6 < errors[1]


async def test_streams_in_flight_do_not_mix(codec: Engine) -> None:
    """Each has its own state."""

    async def chunks(codes: torch.Tensor) -> AsyncIterator[Chunk]:
        for i, part in enumerate(codes.split(2)):
            yield Chunk(i, tensors={"codes": part})
            await asyncio.sleep(0)

    async def speak(seed: int) -> torch.Tensor:
        given = {"codes": StageInput(chunks=chunks(some_codes(8, seed)))}
        return audio_of(await codec.run(StageRequest("test", {}), given, NullEmit()))

    alone = [await speak(seed) for seed in range(3)]
    for one, other in zip(await asyncio.gather(*map(speak, range(3))), alone, strict=True):
        assert torch.equal(one, other)


async def test_wrong_codes(codec: Engine) -> None:
    """Refused by what is allowed."""
    with pytest.raises(InvalidRequest, match="0 to 15, are 0 to 16"):
        await ask(codec, {}, codes=torch.tensor([[0, 16, 1, 1]]))
    with pytest.raises(InvalidRequest, match="1 to 4 codebooks"):
        await ask(codec, {}, codes=torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(InvalidRequest, match="missing"):
        await ask(codec, {}, prompt="a")

    async def none() -> AsyncIterator[Chunk]:
        return
        yield  # an iterator, not a coroutine

    with pytest.raises(EngineError, match="before it said anything"):
        await codec.run(StageRequest("t", {}), {"codes": StageInput(chunks=none())}, NullEmit())


async def test_voices_by_name(made: Callable[..., Path]) -> None:
    """As the stage names them."""
    engine = await loaded(ar_stage(made(), engine_args={"voices": {"alloy": 3}}))
    named, numbered = [
        codes_of(await ask(engine, {"seed": 1}, prompt=TEXT, voice=voice))
        for voice in ("alloy", "3")
    ]
    assert torch.equal(named, numbered)
    with pytest.raises(InvalidRequest, match=r"0, 1 \.\.\., alloy; is 'ash'"):
        await ask(engine, {}, prompt=TEXT, voice="ash")
    await engine.unload()


async def test_models_that_do_not_fit(made: Callable[..., Path], model: Path) -> None:
    """Said at load, with what would fit."""
    with pytest.raises(ConfigError, match="chunk_frames must be a whole number of at least 1"):
        await loaded(ar_stage(made(), engine_args={"chunk_frames": 0}))
    with pytest.raises(ConfigError, match="voices: must map names to numbers"):
        await loaded(ar_stage(made(), engine_args={"voices": {"alloy": "low"}}))
    with pytest.raises(ConfigError, match="with the codec None; allowed: mimi"):
        await create_engine(decode_stage(model / "text_encoder")).load()


# -- glue --------------------------------------------------------------------------------------


def test_frames_and_portions() -> None:
    """The last code of an end frame may be anything; then it is sound."""
    assert ends([0, 0, 5], 0)
    assert not ends([0, 5, 0], 0)
    assert is_sound([0, 0, 5], 0)
    assert not is_sound([0, 0, 0], 0)
    assert list(portions(7, 0, 3, final=False)) == [(0, 3), (3, 6)]
    assert list(portions(7, 6, 3, final=True)) == [(6, 7)]
    assert list(portions(6, 6, 3, final=True)) == []
