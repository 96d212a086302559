"""Requests that share transformer forwards, step by step: equal to each alone, and few forwards."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_helpers import (
    ALWAYS,
    Condition,
    cfg,
    condition,
    dit_stage,
    held,
    latents_of,
    loaded_now,
    off,
    params,
    picture,
    send,
)
from engine_helpers import Recorder, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_families import WIDTH, make

from omniq.errors import ConfigError, DeadlineExceeded, EngineError, EngineOutOfMemory

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A loaded DiT stage of a family, made once."""
    found: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in found:
            folder = make(name, tmp_path_factory.mktemp("families") / name)
            more: dict[str, Any] = {}
            if name in ("qwen_image_edit", "wan_i2v", "flux2_klein"):
                more = {"input_modalities": ["image"]}
            found[name] = loaded_now(dit_stage(folder, **more))
        return found[name]

    return get


async def alone_and_together(
    engine: Any, requests: list[tuple[dict[str, Any], Condition, dict[str, Any]]]
) -> tuple[list[torch.Tensor], list[torch.Tensor], int, int]:
    """Latents alone and together, and the forwards of both."""
    runner = engine.part.runner

    async def one(i: int) -> torch.Tensor:
        given, made, more = requests[i]
        return latents_of(await send(engine, given, request_id=f"r{i}", condition=made, **more))

    before = runner.forwards
    alone = [await one(i) for i in range(len(requests))]
    middle = runner.forwards
    async with held(engine) as go:
        tasks = [asyncio.create_task(one(i)) for i in range(len(requests))]
        await until(lambda: len(engine.part.loop._inbox) == len(requests))
        go.set()
        together = await asyncio.gather(*tasks)
    return alone, together, middle - before, runner.forwards - middle


@pytest.mark.parametrize("name", ["z_image", "flux", "flux2_klein", "sd3", "qwen_image", "wan"])
@pytest.mark.parametrize("guided", [False, True])
async def test_batched_equals_alone(engines: Callable[[str], Any], name: str, guided: bool) -> None:
    """Different prompts, seeds and step counts; text of other lengths where the family masks."""
    lengths = [9, 9, 9] if name in ("flux2_klein", "sd3", "wan") else [5, 12, 9]
    requests = []
    for i, (steps, tokens) in enumerate(zip([4, 7, 5], lengths, strict=True)):
        guidance = cfg(name, 2.0 + i) if guided else off(name)
        given = params(name, num_inference_steps=steps, seed=i, **guidance)
        requests.append((given, condition(name, tokens, i), {}))
    alone, together, apart, shared = await alone_and_together(engines(name), requests)
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)
    # Those with 4, 5 and 7 steps end with the longest; one more where a pair is not foreseen yet.
    assert shared <= 7 + guided < 16 <= apart


async def test_edits_with_one_size_share_forwards(
    engines: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit

    areas = edit.calculate_dimensions
    monkeypatch.setattr(edit, "calculate_dimensions", lambda _, ratio: areas(64 * 64, ratio))
    name = "qwen_image_edit"
    requests = [
        (params(name, seed=i, **cfg(name, 3.0)), condition(name, 6 + i, i), {"image": picture(i)})
        for i in range(2)
    ]
    alone, together, apart, shared = await alone_and_together(engines(name), requests)
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)
    assert shared == 5 < apart  # the second of the first pair is not foreseen


@pytest.mark.parametrize("name", ["wan_i2v", "flux2_klein"])
async def test_pictures_of_other_requests_share_forwards(
    engines: Callable[[str], Any], name: str
) -> None:
    """First frames of videos, with what CLIP sees of them; references of FLUX.2 of one size."""
    requests = []
    for i in range(2):
        made = condition(name, 512 if name == "wan_i2v" else 9, i)
        if name == "wan_i2v":
            made["image_embeds"] = torch.randn(
                257, WIDTH, generator=torch.Generator().manual_seed(i)
            )
        given = params(name, num_frames=5) if name == "wan_i2v" else params(name)
        shown = picture(i, 64, 64)
        requests.append(({**given, "seed": i, **cfg(name, 3.0)}, made, {"image": shown}))
    alone, together, apart, shared = await alone_and_together(engines(name), requests)
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)
    assert shared == 5 < apart


async def test_guidance_pair_is_one_forward_from_the_second_step_on(
    engines: Callable[[str], Any],
) -> None:
    """And none at all without guidance."""
    for name in ("qwen_image", "flux", "wan"):
        engine = engines(name)
        made = condition(name, 9)
        counts = []
        for guidance in (cfg(name, 3.0), off(name)):
            before = engine.part.runner.forwards
            await send(engine, params(name, num_inference_steps=6, **guidance), condition=made)
            counts.append(engine.part.runner.forwards - before)
        assert counts == [7, 6]


async def test_other_sizes_do_not_share_and_do_not_wait(engines: Callable[[str], Any]) -> None:
    """Two groups take turns: the short request of the second is not behind the long first."""
    engine = engines("z_image")
    ended: list[str] = []

    async def one(name: str, **more: Any) -> None:
        await send(
            engine, params("z_image", guidance_scale=0.0, **more), request_id=name,
            condition=condition("z_image", 5),
        )  # fmt: skip
        ended.append(name)

    async with held(engine) as go:
        both = asyncio.gather(
            one("long", num_inference_steps=60), one("short", num_inference_steps=4, height=48)
        )
        await until(lambda: len(engine.part.loop._inbox) == 2)
        go.set()
        await both
    assert ended == ["short", "long"]


class _Steps(Recorder):
    """Calls a function after a step, on the model thread."""

    def __init__(self, at: int, do: Callable[[], None]) -> None:
        super().__init__()
        self._at, self._do = at, do

    def progress(self, step: int, total: int) -> None:
        super().progress(step, total)
        if step == self._at:
            self._do()


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_cancel_in_a_batch_leaves_the_others_unharmed(
    engines: Callable[[str], Any], at: int
) -> None:
    engine = engines("qwen_image")
    name, made = "qwen_image", condition("qwen_image", 7)
    calm = params(name, num_inference_steps=6, seed=3, **cfg(name, 2.0))
    expected = latents_of(await send(engine, calm, condition=made))
    loop, here = asyncio.get_running_loop(), threading.Event()
    gone = asyncio.create_task(
        send(engine, params(name, num_inference_steps=300, **cfg(name, 4.0)),
             _Steps(at, lambda: (loop.call_soon_threadsafe(gone.cancel), here.wait(5))),
             request_id="gone", condition=condition(name, 4))
    )  # fmt: skip
    gone.add_done_callback(lambda _: here.set())
    stays = asyncio.create_task(send(engine, calm, request_id="stays", condition=made))
    loop.call_later(0.2, here.set)
    with pytest.raises(asyncio.CancelledError):
        await gone
    torch.testing.assert_close(latents_of(await stays), expected, atol=TOLERANCE, rtol=0)
    assert not engine.part.loop._jobs


@pytest.fixture
def transformer(engines: Callable[[str], Any]) -> Iterator[Callable[[str, Any], Any]]:
    """Puts a function before each forward of a family's transformer."""
    hooks: list[Any] = []

    def put(name: str, function: Callable[[dict[str, Any]], None]) -> Any:
        engine = engines(name)
        model = engine.part.pipeline.transformer
        hooks.append(
            model.register_forward_pre_hook(lambda _m, _a, k: function(k), with_kwargs=True)
        )
        return engine

    yield put
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", ["z_image", "flux", "sd3", "qwen_image"])
async def test_out_of_memory_splits_the_batch(
    transformer: Callable[..., Any], engines: Callable[[str], Any], name: str
) -> None:
    """No more than one row fits: everybody still gets what they get alone."""
    form = engines(name).part.family.form
    requests = [
        (params(name, seed=i, **cfg(name, 2.0)), condition(name, 8, i), {}) for i in range(2)
    ]
    expected = [latents_of(await send(engines(name), g, condition=c)) for g, c, _ in requests]

    def too_large(kwargs: dict[str, Any]) -> None:
        if len(kwargs[form.latents]) > 1:
            torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte

    engine = transformer(name, too_large)
    together = await asyncio.gather(
        *[send(engine, g, request_id=f"r{i}", condition=c) for i, (g, c, _) in enumerate(requests)]
    )
    for a, b in zip(expected, together, strict=True):
        torch.testing.assert_close(a, latents_of(b), atol=TOLERANCE, rtol=0)
    times = engine.part.runner._times
    assert all(group.memory_limit == 1 for group in list(times._groups.values())[-1:])
    times._groups.clear()


@pytest.mark.parametrize("step", [0, 1, 2, 3])
async def test_out_of_memory_of_one_row_fails_only_its_request(
    transformer: Callable[..., Any], step: int
) -> None:
    """At whichever step it comes; the mate goes on."""
    made = condition("sd3", 8)
    marked = condition("sd3", 8, 5)
    seen = itertools.count()

    def fails(kwargs: dict[str, Any]) -> None:
        text = kwargs["encoder_hidden_states"]
        if (text == marked["prompt_embeds"]).flatten(1).all(1).any() and next(seen) >= step:
            torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte

    engine = transformer("sd3", lambda _: None)
    calm = params("sd3", seed=4)
    expected = latents_of(await send(engine, calm, condition=made))
    transformer("sd3", fails)
    results = await asyncio.gather(
        send(engine, params("sd3"), request_id="bad", condition=marked),
        send(engine, calm, request_id="good", condition=made),
        return_exceptions=True,
    )
    assert isinstance(results[0], EngineOutOfMemory)
    torch.testing.assert_close(latents_of(results[1]), expected, atol=TOLERANCE, rtol=0)
    engine.part.runner._times._groups.clear()


async def test_an_error_in_a_batch_fails_only_the_request_that_causes_it(
    transformer: Callable[..., Any],
) -> None:
    bad = condition("qwen_image", 7, 9)

    def fails(kwargs: dict[str, Any]) -> None:
        text = kwargs["encoder_hidden_states"][:, :7]
        if text.shape[1] == 7 and (text == bad["prompt_embeds"]).flatten(1).all(1).any():
            raise RuntimeError("this prompt is cursed")

    engine = transformer("qwen_image", fails)
    results = await asyncio.gather(
        send(engine, params("qwen_image"), request_id="bad", condition=bad),
        send(engine, params("qwen_image"), request_id="a", condition=condition("qwen_image", 7)),
        send(engine, params("qwen_image"), request_id="b", condition=condition("qwen_image", 5)),
        return_exceptions=True,
    )
    assert isinstance(results[0], EngineError)
    assert "cursed" in str(results[0])
    assert all(torch.isfinite(latents_of(r)).all() for r in results[1:])


async def test_nan_of_one_request_does_not_reach_its_mates(
    engines: Callable[[str], Any],
) -> None:
    engine = engines("flux")
    broken = condition("flux", 8)
    broken["prompt_embeds"][0, 0] = float("nan")
    calm = params("flux", seed=2)
    expected = latents_of(await send(engine, calm, condition=condition("flux", 8, 1)))
    results = await asyncio.gather(
        send(engine, params("flux"), request_id="bad", condition=broken),
        send(engine, calm, request_id="good", condition=condition("flux", 8, 1)),
        return_exceptions=True,
    )
    assert isinstance(results[0], EngineError)
    assert "NaN or infinity after 1 steps" in str(results[0])
    torch.testing.assert_close(latents_of(results[1]), expected, atol=TOLERANCE, rtol=0)


async def test_a_passed_deadline_ends_a_request_between_steps(
    engines: Callable[[str], Any],
) -> None:
    engine = engines("z_image")
    with pytest.raises(DeadlineExceeded, match=r"deadline passed after \d+ of 1000 steps"):
        await send(
            engine, params("z_image", num_inference_steps=1000, guidance_scale=0.0),
            deadline=time.monotonic() + 0.3, condition=condition("z_image", 5),
        )  # fmt: skip


async def test_a_cancelled_request_leaves_no_fault_unheard(engines: Callable[[str], Any]) -> None:
    """asyncio would log a traceback for each, as if something were broken."""
    heard: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: heard.append(context))
    recorder = Recorder()
    work = asyncio.create_task(
        send(
            engines("z_image"), params("z_image", num_inference_steps=1000, guidance_scale=0.0),
            condition=condition("z_image", 5), emit=recorder,
        )
    )  # fmt: skip
    await until(lambda: bool(recorder.steps))
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    del work
    gc.collect()
    await asyncio.sleep(0)
    loop.set_exception_handler(None)
    assert heard == []


_steps = st.integers(1, 6)
_request = st.fixed_dictionaries(
    {
        "steps": _steps,
        "tokens": st.integers(1, 14),
        "guided": st.booleans(),
        "height": st.sampled_from([32, 48]),
        "seed": st.integers(0, 50),
        "cancel": st.one_of(st.none(), st.integers(1, 3)),
        "priority": st.integers(0, 9),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen_image", "z_image"])
def test_random_mixes_equal_each_alone(engines: Callable[[str], Any], name: str) -> None:
    """100 mixes of sizes, lengths, steps, guidance, priorities and cancels, for two families."""
    engine = engines(name)
    known: dict[Any, torch.Tensor] = {}

    async def one(i: int, asked: dict[str, Any], cancel: int | None) -> torch.Tensor | None:
        guidance = cfg(name, 2.5) if asked["guided"] else off(name)
        given = params(
            name, num_inference_steps=asked["steps"], seed=asked["seed"],
            height=asked["height"], **guidance,
        )  # fmt: skip
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        emit = _Steps(cancel or -1, lambda: loop.call_soon_threadsafe(task.cancel) and None)
        try:
            out = await send(
                engine, given, emit, request_id=f"r{i}", priority=asked["priority"],
                condition=condition(name, asked["tokens"], asked["seed"]),
            )  # fmt: skip
        except asyncio.CancelledError:
            return None
        return latents_of(out)

    async def mix(asked: list[dict[str, Any]]) -> None:
        tasks = [asyncio.create_task(one(i, a, a["cancel"])) for i, a in enumerate(asked)]
        results = await asyncio.gather(*tasks)
        for a, got in zip(asked, results, strict=True):
            if got is None:
                assert a["cancel"] is not None
                continue
            key = tuple(a[k] for k in ("steps", "tokens", "guided", "height", "seed"))
            if key not in known:
                alone = await one(0, a, None)
                assert alone is not None
                known[key] = alone
            torch.testing.assert_close(got, known[key], atol=TOLERANCE, rtol=0)
        assert not engine.part.loop._jobs

    @settings(
        max_examples=100, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(_request, min_size=2, max_size=5))
    def run(asked: list[dict[str, Any]]) -> None:
        asyncio.run(mix(asked))

    run()


async def test_family_without_rules_runs_alone(
    engines: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Still step by step in turns, only never two in one forward."""
    engine = engines("sd3")
    monkeypatch.setattr(type(engine.part.family), "form", None)
    requests = [(params("sd3", seed=i), condition("sd3", 5, i), {}) for i in range(3)]
    alone, together, apart, shared = await alone_and_together(engine, requests)
    assert shared == apart == 12
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


async def test_scheduler_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("sd3", tmp_path / "sd3")
    with pytest.raises(ConfigError, match="no DiT scheduler 'lifo'; allowed: fair"):
        loaded_now(dit_stage(folder, dit={"batching": {"scheduler": "lifo"}}))
    info = tmp_path / "lifo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lifo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[omniq.dit_schedulers]\nlifo = lifo_plugin:Lifo\n")
    (tmp_path / "lifo_plugin.py").write_text(
        "from omniq import OmniDiffusionScheduler\n"
        "class Lifo(OmniDiffusionScheduler):\n"
        "    def pick(self, waiting, now):\n"
        "        return [max(waiting, key=lambda t: t.order)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    engine: Any = loaded_now(dit_stage(folder, dit={**ALWAYS, "batching": {"scheduler": "lifo"}}))
    ended: list[int] = []

    async def one(i: int) -> None:
        await send(engine, params("sd3"), request_id=f"{i}", condition=condition("sd3", 5))
        ended.append(i)

    async with held(engine) as go:
        all_three = asyncio.gather(*[one(i) for i in range(3)])
        await until(lambda: len(engine.part.loop._inbox) == 3)
        go.set()
        await all_three
    assert ended == [2, 1, 0]
