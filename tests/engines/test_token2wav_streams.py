"""Streams of Qwen2.5-Omni's token2wav: what is kept between windows, and several at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import until
from omni_stages import Chunks, omni_stage
from tiny_qwen_omni import CODES, MEL, make_qwen_omni

from omniq.engines import create_engine
from omniq.engines.base import Chunk, NullEmit, StageInput, StageRequest
from omniq.engines.omni import token2wav
from omniq.engines.omni.flow import Flow, Past, Stretch, integrate
from omniq.errors import EngineError, InvalidRequest

BLOCK = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_omni(tmp_path_factory.mktemp("omni") / "tiny-qwen2.5-omni")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """As on the model thread."""
    with torch.no_grad():
        yield


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[Any]:
    engine = create_engine(omni_stage(folder, "token2wav"))
    await engine.load()
    yield engine
    await engine.unload()


def codes_of(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, CODES, (count,), generator=torch.Generator().manual_seed(seed))


def noise_of(count: int, seed: int = 5) -> torch.Tensor:
    """Of so many codes."""
    return torch.randn(2 * count, MEL, generator=torch.Generator().manual_seed(seed))


def by_stretches(dit: Any, codes: torch.Tensor, flow: Flow, *blocks: int) -> torch.Tensor:
    """The spectrogram by stretches of so many blocks, and the rest."""
    noise, past, begin = noise_of(len(codes)), Past(), 0
    mels = []
    for count in (*blocks, 0):
        end = begin + count * BLOCK if count else len(noise)
        part = Stretch(
            codes[begin // 2 : end // 2], noise[begin:end], flow, begin, past, end if count else 0
        )
        mels += integrate(dit, [part])
        begin = end
    return torch.cat(mels)


@pytest.mark.parametrize("guidance", [0.5, 0.0])
async def test_what_is_kept_is_all_that_a_stretch_needs_of_what_is_before_it(
    engine: Any, guidance: float
) -> None:
    """With no layer that looks ahead nothing else is missing: all ten steps are those of the whole.

    That nothing is kept for the last stretch, and that each reads what the one before it left, is
    seen by stretches of several lengths.
    """
    flow = engine.flow_of({"guidance_scale": guidance})
    codes = codes_of(110)
    for layer in engine._dit.transformer_blocks:
        layer.look_ahead_block = 0
    (whole,) = integrate(engine._dit, [Stretch(codes, noise_of(110), flow)])
    for blocks in ((3, 3, 3), (1, 1, 4)):
        made = by_stretches(engine._dit, codes, flow, *blocks)
        torch.testing.assert_close(made, whole, atol=1e-5, rtol=0)
    past_of_another = Stretch(codes[36:], noise_of(110)[72:], flow, 72)  # without any
    (cut,) = integrate(engine._dit, [past_of_another])
    assert (cut - whole[72:]).abs().max() > 1e-3


async def test_stretches_at_once_are_as_alone(engine: Any) -> None:
    """Of several lengths, places in their utterance, voices and guidance; so is what they keep."""
    flows = [
        engine.flow_of({}),
        engine.flow_of({"speaker": "Ethan", "guidance_scale": 2.0}),
        engine.flow_of({"guidance_scale": 1.0}),
    ]
    shapes = [(0, 3, 48, 72), (3, 3, 41, 96), (1, 2, 5, 0)]  # blocks before; codes; kept until

    def stretches() -> list[Stretch]:
        made = []
        for i, (flow, (before, _, count, keep)) in enumerate(zip(flows, shapes, strict=True)):
            past = Past()
            if before:
                begun = Stretch(codes_of(12, i), noise_of(12, i), flow, 0, past, BLOCK)
                integrate(engine._dit, [begun])
            begin = before * BLOCK
            made.append(
                Stretch(codes_of(count, 9 + i), noise_of(count, i), flow, begin, past, keep)
            )
        return made

    alone, together = stretches(), stretches()
    expected = [integrate(engine._dit, [stretch])[0] for stretch in alone]
    made = integrate(engine._dit, together)
    for mel, other in zip(made, expected, strict=True):
        torch.testing.assert_close(mel, other, atol=1e-5, rtol=0)
    for stretch, other in zip(together, alone, strict=True):
        assert stretch.past is not None
        assert other.past is not None
        if other.past.states is None:
            assert stretch.past.states is None
        else:
            torch.testing.assert_close(stretch.past.states, other.past.states, atol=1e-5, rtol=0)


def asked(seed: int, steps: int = 3, **params: Any) -> StageRequest:
    return StageRequest(f"of-{seed}", {"seed": seed, "num_steps": steps, **params}, stream=True)


def given(codes: torch.Tensor) -> dict[str, StageInput]:
    """By chunks, as a talker gives them."""

    async def chunks() -> AsyncIterator[Chunk]:
        for i, part in enumerate(codes.split(12)):
            yield Chunk(i, tensors={"codes": part})

    return {"codes": StageInput(chunks=chunks())}


async def said(engine: Any, seed: int, count: int, **params: Any) -> list[torch.Tensor]:
    """The packets of a stream."""
    heard = Chunks("audio")
    await engine.run(asked(seed, **params), given(codes_of(count, seed)), heard)
    return heard.tensors


async def test_streams_at_once_share_turns_and_say_what_each_says_alone(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same packets; those of another number of steps in turns of their own."""
    several = [(1, 90, {}), (2, 50, {"speaker": "Ethan"}), (3, 70, {}), (4, 60, {"steps": 4})]
    alone = [await said(engine, seed, n, **more) for seed, n, more in several]
    turns: list[list[int]] = []

    def counted(dit: Any, stretches: list[Stretch]) -> list[torch.Tensor]:
        turns.append([stretch.flow.num_steps for stretch in stretches])
        return integrate(dit, stretches)

    monkeypatch.setattr(token2wav, "integrate", counted)
    async with busy_thread(engine, waiting=4):
        together = asyncio.gather(*(said(engine, seed, n, **more) for seed, n, more in several))
    packets_of = await together
    assert len(turns[0]) == 3
    assert all(len(set(steps)) == 1 for steps in turns)
    for packets, expected in zip(packets_of, alone, strict=True):
        assert [len(packet) for packet in packets] == [len(packet) for packet in expected]
        torch.testing.assert_close(torch.cat(packets), torch.cat(expected), atol=1e-4, rtol=0)
    assert not engine.waiting


@asynccontextmanager
async def busy_thread(engine: Any, *, waiting: int) -> AsyncIterator[None]:
    """Nobody has a turn before so many streams wait for one."""
    go_on = threading.Event()
    holding = asyncio.create_task(engine.in_thread(go_on.wait, 30))
    yield
    await until(lambda: len(engine.waiting) == waiting)
    go_on.set()
    assert await holding


class _Gate:
    """``integrate`` that stands still in its first turn, and remembers what is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.kept: list[weakref.ref[torch.Tensor]] = []
        self.turns: list[int] = []
        monkeypatch.setattr(token2wav, "integrate", self)

    def __call__(self, dit: Any, stretches: list[Stretch]) -> list[torch.Tensor]:
        self.turns.append(len(stretches))
        self.reached.set()
        assert self.go_on.wait(30)
        made = integrate(dit, stretches)
        for stretch in stretches:
            if stretch.past is not None and stretch.past.states is not None:
                self.kept.append(weakref.ref(stretch.past.states))
        return made


@pytest.mark.parametrize("its_own_turn", [True, False])
async def test_a_cancelled_stream_leaves_nothing_and_the_others_go_on(
    engine: Any, monkeypatch: pytest.MonkeyPatch, its_own_turn: bool
) -> None:
    """While its window is decoded, in its own turn or in that of another."""
    alone = await said(engine, 1, 70)
    gate = _Gate(monkeypatch)
    async with busy_thread(engine, waiting=2):
        streams = [(1, 70), (2, 150)]
        tasks = [
            asyncio.create_task(said(engine, *stream))
            for stream in (streams[::-1] if its_own_turn else streams)
        ]
    going, gone = tasks[::-1] if its_own_turn else tasks
    assert await asyncio.to_thread(gate.reached.wait, 30)
    assert gate.turns == [2]
    gone.cancel()
    await asyncio.sleep(0)
    gate.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await gone
    torch.testing.assert_close(torch.cat(await going), torch.cat(alone), atol=1e-4, rtol=0)
    assert gate.turns[-1] == 1
    del going, gone, tasks
    gc.collect()
    assert gate.kept
    assert not [ref for ref in gate.kept if ref() is not None]
    assert not engine.waiting


async def test_a_turn_that_fails_ends_those_in_it_only(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await said(engine, 3, 50, steps=4)

    def broken(dit: Any, stretches: list[Stretch]) -> list[torch.Tensor]:
        if len(stretches) > 1:
            raise RuntimeError("no memory for windows")
        return integrate(dit, stretches)

    monkeypatch.setattr(token2wav, "integrate", broken)
    async with busy_thread(engine, waiting=3):
        together = asyncio.gather(
            said(engine, 1, 60), said(engine, 2, 60), said(engine, 3, 50, steps=4),
            return_exceptions=True,
        )  # fmt: skip
    bad, also, good = await together
    for fault in (bad, also):
        assert isinstance(fault, EngineError)
        assert "no memory for windows" in str(fault)
    assert not isinstance(good, BaseException)
    assert torch.cat(good).equal(torch.cat(alone))
    assert not engine.waiting


async def test_what_a_stream_keeps_is_bounded(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not grow with the utterance, and more steps than fit are refused by name."""
    gate = _Gate(monkeypatch)
    gate.go_on.set()
    sizes = []
    for count in (60, 150):
        utterance = engine.utterance(asked(1))
        utterance.push(codes_of(count))
        assert list(utterance.sounds(ended=False))
        kept = gate.kept[-1]()
        assert kept is not None
        sizes.append(kept.nbytes)
        del kept
        utterance.close()
    flow = engine.flow_of({"num_steps": 3})
    assert sizes == [Past.nbytes(engine._dit, flow)] * 2
    step = sizes[0] // 2
    monkeypatch.setattr(token2wav, "PAST_BYTES", 3 * step)
    await engine.run(asked(1, 4), given(codes_of(10)), NullEmit())
    with pytest.raises(InvalidRequest, match="num_steps: must be at most 4 for a stream, is 5"):
        await engine.run(asked(1, 5), given(codes_of(10)), NullEmit())
    whole = StageRequest("whole", {"seed": 1, "num_steps": 5}, stream=False)
    await engine.run(whole, given(codes_of(10)), NullEmit())
