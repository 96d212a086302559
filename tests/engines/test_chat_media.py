"""Sound and videos in messages and inputs, as they reach vLLM; no vLLM is needed."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from sounds import tone

from omniq.engines.base import StageInput
from omniq.engines.vllm import media
from omniq.errors import InvalidRequest
from omniq.outputs.base import OutputContext
from omniq.outputs.sound import to_int16
from omniq.outputs.sound_files import encoded
from omniq.outputs.video import VideoHandler

RATE = 16_000


def sound(form: str) -> bytes:
    return encoded(to_int16(tone(RATE)), RATE, form, OutputContext("j"))


def clip(count: int = 8) -> bytes:
    context = OutputContext("j", "", {"decode": {"fps": 4.0}})
    frames = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 16, 16, 3) * 20
    artifact = VideoHandler().encode("v", "mp4", {"v": frames.contiguous()}, context).artifact
    assert artifact is not None
    return artifact.data


def url(data: bytes) -> str:
    return f"data:x/y;base64,{base64.b64encode(data).decode()}"


def of(part: dict[str, Any]) -> Any:
    return media.of_messages([{"role": "user", "content": [part]}])


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus", "aac"])
def test_sound_in_messages(form: str) -> None:
    data = sound(form)
    given = {"data": base64.b64encode(data).decode(), "format": form}
    for part in (
        {"type": "input_audio", "input_audio": given},
        {"type": "audio_url", "audio_url": {"url": url(data)}},
    ):
        plain, found = of(part)
        assert plain[0]["content"] == [{"type": "audio"}]
        ((samples, rate),) = found["audio"]
        assert rate == (48_000 if form == "opus" else RATE)
        assert samples.dtype == np.float32 and len(samples) / rate == pytest.approx(0.5, abs=0.15)
        if form in ("wav", "flac"):
            assert np.array_equal(samples, to_int16(tone(RATE)).astype(np.float32) / 32_768)


def test_wav_needs_no_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    by_av = media._sound(sound("wav"), "x")
    monkeypatch.setattr(media, "find_spec", lambda name: None)
    plain = media._sound(sound("wav"), "x")
    assert np.array_equal(plain[0], by_av[0]) and plain[1] == by_av[1]


@pytest.mark.parametrize("with_av", [True, False])
def test_a_wav_without_samples_is_refused(monkeypatch: pytest.MonkeyPatch, with_av: bool) -> None:
    if not with_av:
        monkeypatch.setattr(media, "find_spec", lambda name: None)
    empty = base64.b64encode(encoded(np.zeros(0, np.int16), RATE, "wav", OutputContext("j")))
    part = {"type": "input_audio", "input_audio": {"data": empty.decode(), "format": "wav"}}
    with pytest.raises(InvalidRequest, match="holds no samples"):
        of(part)


def test_video_in_messages() -> None:
    plain, found = of({"type": "video_url", "video_url": {"url": url(clip())}})
    assert plain[0]["content"] == [{"type": "video"}]
    ((frames, about),) = found["video"]
    assert frames.shape == (4, 16, 16, 3) and frames.dtype == np.uint8
    assert (about["fps"], about["duration"], about["total_num_frames"]) == (2.0, 2.0, 4)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "audio_url", "audio_url": {"url": "http://h/x"}}, "nothing is fetched"),
        ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, "nothing is fetched"),
        ({"type": "audio_url", "audio_url": {"url": url(b"x")}}, "audio_url holds no sound"),
        ({"type": "video_url", "video_url": {"url": url(b"x")}}, "video_url holds no video"),
        ({"type": "video_url", "video_url": None}, "must be a data: URL"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "exe"}}, "needs format"),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "mp3"}}, "not base64"),
        ({"type": "video_url", "video_url": {"url": url(clip(1040))}}, "at most 256 frames"),
        ({"type": "smell"}, "one of text, image_url, input_audio, audio_url, video_url"),
    ],
)
def test_what_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        of(part)
    assert [f["field"] for f in caught.value.fields] == ["input.messages"]


def test_inputs_of_a_pipeline() -> None:
    """With what :mod:`omniq.inputs` says of each."""
    samples = torch.from_numpy(tone(8_000))
    frames = torch.zeros(3, 4, 6, 3, dtype=torch.uint8)
    found = media.of_inputs(
        {
            "audio": StageInput(
                [{"sample_rate": 8_000}, {"sample_rate": 9_000}], {"0": samples, "1": samples}
            ),
            "video": StageInput([{"fps": 4.0}], {"0": frames}),
        }
    )
    assert [rate for _, rate in found["audio"]] == [8_000, 9_000]
    assert found["video"][0][1]["fps"] == 4.0
    old = media.of_inputs({"audio": StageInput({"sample_rate": 8_000}, {"0": samples})})
    assert old["audio"][0][1] == 8_000
    file = torch.frombuffer(bytearray(clip()), dtype=torch.uint8)
    read = media.of_inputs({"video": StageInput([{"bytes": len(file)}], {"0": file})})
    assert read["video"][0][0].shape == (4, 16, 16, 3)
    with pytest.raises(InvalidRequest, match=r"input\.video: must be MP4"):
        media.of_inputs({"video": StageInput(None, {"0": file[200:]})})
    with pytest.raises(InvalidRequest, match=r"must be uint8 \[frames, H, W, 3\]"):
        media.of_inputs({"video": StageInput(None, {"0": frames.float()})})
