"""Sound and videos of a request: formats, rates, and what is refused."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from safetensors.numpy import load
from sounds import tone
from test_input_files import encoded as picture

from omniq.config import PipelineConfig
from omniq.config.pipeline import InputConfig
from omniq.config.request import validate_request
from omniq.errors import InputTooLarge, InvalidRequest, OmniqError, UnsupportedInput
from omniq.inputs import InputFile, read_inputs
from omniq.inputs.videos import chosen_frames
from omniq.outputs.base import OutputContext
from omniq.outputs.sound import to_int16
from omniq.outputs.sound_files import encoded
from omniq.outputs.video import VideoHandler

RATE = 16_000
PIPELINE = PipelineConfig.model_validate(
    {
        "name": "omni",
        "inputs": {
            "audio": {"type": "audio", "required": False, "max_items": 2, "max_seconds": 1.5},
            "video": {"type": "video", "required": False, "max_pixels": 2000, "max_frames": 12},
            "slow": {"type": "video", "required": False, "max_pixels": 2000, "fps": 4},
            "file": {"type": "video", "required": False, "max_pixels": 2000, "as_file": True},
        },
        "stages": [{"stage_id": "ar", "engine_type": "AR", "model": "none"}],
        "edges": [
            {"from": f"input.{n}", "to": f"ar.{n}"} for n in ("audio", "video", "slow", "file")
        ],
        "outputs": {"text": {"from": "ar.text", "type": "text"}},
    }
)


async def read(value: Any, name: str = "audio", *, local: bool = False) -> InputFile:
    async def fetch(job: str, artifact: str) -> bytes:
        return sound("flac")

    validate_request(PIPELINE, {name: value}, {})
    found = (await read_inputs(PIPELINE, {name: value}, fetch, local=local))[name]
    assert isinstance(found, InputFile)
    return found


async def array(value: Any, name: str = "audio", **more: Any) -> Any:
    return load((await read(value, name, **more)).data)["0000"]


def sound(form: str, rate: int = RATE, seconds: float = 0.5, channels: int = 1) -> bytes:
    one = tone(rate, seconds)
    samples = one if channels == 1 else np.stack([one, -one * 0.5])
    return encoded(to_int16(samples), rate, form, OutputContext("j"))


def frames(count: int = 8, height: int = 32, width: int = 48) -> Any:
    """Columns that get brighter frame by frame."""
    made = np.zeros((count, height, width, 3), np.uint8)
    made[:, :, : width // 2] = (20 * np.arange(count, dtype=np.uint8))[:, None, None, None]
    return made


def video(data: Any = None, fps: float = 8.0) -> bytes:
    import torch

    context = OutputContext("j", "", {"decode": {"fps": fps}})
    given = torch.from_numpy(frames() if data is None else data)
    artifact = VideoHandler().encode("v", "mp4", {"v": given}, context).artifact
    assert artifact is not None
    return artifact.data


def shortened(data: bytes) -> bytes:
    """The same MP4 with an edit list that begins at its fourth frame."""
    at = data.index(b"elst") + 4 + 4 + 4  # version and flags, count
    length, start, speed = struct.unpack(">iiI", data[at : at + 12])
    scale = struct.unpack(">I", data[data.index(b"mdhd") + 16 :][:4])[0]
    edit = struct.pack(">iiI", length, start + 3 * scale // 8, speed)
    return data[:at] + edit + data[at + 12 :]


def remuxed(data: bytes, form: str) -> bytes:
    """The same stream in another container."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format=form) as target:
        stream = target.add_stream_from_template(source.streams[0])
        for packet in source.demux(source.streams[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    return out.getvalue()


@pytest.mark.parametrize("form", ["wav", "flac"])
async def test_lossless_sound_keeps_its_samples(form: str) -> None:
    made = await read(sound(form))
    samples = load(made.data)["0000"]
    assert samples.dtype == np.float32
    assert np.array_equal(samples, to_int16(tone(RATE)).astype(np.float32) / 32_768)
    assert made.shown == [{"sample_rate": RATE, "samples": 8000}]


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100])
@pytest.mark.parametrize("form", ["wav", "mp3", "opus", "aac"])
async def test_any_sound_comes_at_the_pipelines_rate(form: str, rate: int) -> None:
    samples = await array(sound(form, rate))
    assert len(samples) / RATE == pytest.approx(0.5, abs=0.3 if form == "aac" else 0.12)
    middle = samples[int(0.15 * RATE) : int(0.4 * RATE)]
    peak = np.argmax(np.abs(np.fft.rfft(middle * np.hanning(len(middle)))))
    assert peak * RATE / len(middle) == pytest.approx(440, abs=5)
    assert np.sqrt((middle**2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


@pytest.mark.parametrize("form", ["wav", "flac"])
async def test_channels_are_averaged(form: str) -> None:
    stereo = to_int16(np.stack([tone(RATE), -tone(RATE) * 0.5])).astype(np.float32) / 32_768
    assert np.allclose(await array(sound(form, channels=2)), stereo.mean(axis=0), atol=1e-7)


async def test_sound_within_mp4_and_webm_is_read() -> None:
    for form, source in (("mp4", "aac"), ("webm", "opus")):
        samples = await array(remuxed(sound(source), form))
        assert len(samples) / RATE == pytest.approx(0.5, abs=0.3)


async def test_other_ways_to_give_sound() -> None:
    assert np.array_equal(await array({"job": "j", "artifact": "a"}), await array(sound("flac")))
    own = tone(RATE)
    assert np.array_equal(await array(own, local=True), own)
    two = await read([sound("wav"), sound("wav", seconds=0.25)])
    assert [s["samples"] for s in two.shown] == [8000, 4000]


async def test_a_video_comes_as_its_frames() -> None:
    made = await read(video(), "video")
    found = load(made.data)["0000"]
    assert made.shown == [{"width": 48, "height": 32, "frames": 8, "fps": 8.0}]
    assert found.dtype == np.uint8 and found.shape == (8, 32, 48, 3)
    assert np.abs(found.astype(int) - frames()).mean() < 6
    for form in ("mov", "matroska"):
        assert np.array_equal(await array(remuxed(video(), form), "video"), found), form
    own = frames(3)
    assert np.array_equal(await array(own, "video", local=True), own)


async def test_frames_are_taken_at_the_pipelines_rate() -> None:
    made = await read(video(), "slow")
    assert made.shown == [{"width": 48, "height": 32, "frames": 4, "fps": 4.0}]
    shades = load(made.data)["0000"][:, 16, 8, 0]
    assert np.abs(shades.astype(int) - [0, 40, 80, 120]).max() < 6
    slower = await read(video(fps=2.0), "slow")
    assert slower.shown[0]["frames"] == 8, "no frame is taken twice"


async def test_a_video_may_come_as_its_file() -> None:
    """Looked at, but not decoded."""
    made = await read(video(), "file")
    assert made.shown == [{"width": 48, "height": 32, "bytes": len(video())}]
    assert load(made.data)["0000"].tobytes() == video()
    with pytest.raises(ValueError, match="'as_file' is given with type 'video'"):
        InputConfig(type="audio", as_file=True)


async def test_chosen_frames_of_a_video() -> None:
    """Of as many as are counted; another count than decoding gives is not believed."""
    asked: list[tuple[int, float]] = []

    def every_third(total: int, rate: float) -> range:
        asked.append((total, rate))
        return range(0, total, 3)

    whole = await array(video(), "video")
    for form in ("mp4", "matroska"):
        data = remuxed(video(), form)
        chosen = chosen_frames(data, "x", every_third, 1 << 20)
        assert np.array_equal(chosen.pixels, whole[::3])
        assert (chosen.places, chosen.total) == ([0, 3, 6], 8)
        assert chosen.rate == pytest.approx(8, rel=0.01)
    assert [total for total, _ in asked] == [8, 8]
    # An edit list that begins in the middle: packets before it are decoded, not shown.
    asked.clear()
    chosen = chosen_frames(shortened(video()), "x", every_third, 1 << 20)
    assert chosen.total == asked[-1][0] < 8
    assert np.array_equal(chosen.pixels, whole[8 - chosen.total :][::3])
    with pytest.raises(InputTooLarge, match="which are allowed"):
        chosen_frames(video(), "x", every_third, 3 * 48 * 32 * 3 - 1)


async def test_a_video_is_turned_as_it_says() -> None:
    data = video()
    at = data.index(b"tkhd") + 4 + 40
    unity = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    assert data[at : at + 36] == unity
    clockwise = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
    turned = await array(data[:at] + clockwise + data[at + 36 :], "video")
    assert np.array_equal(turned, np.rot90(await array(data, "video"), -1, axes=(1, 2)))


def pcm_float(samples: Any) -> bytes:
    data = np.asarray(samples, "<f4").tobytes()
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 3, 1,
                       RATE, RATE * 4, 4, 32)  # fmt: skip
    return head + struct.pack("<4sI", b"data", len(data)) + data


def empty_wav(behind: bytes) -> bytes:
    """Without samples, but maybe with other chunks behind them."""
    return pcm_float([]) + behind


def mjpeg() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        stream = container.add_stream("mjpeg", rate=8)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuvj420p"
        for pixels in frames():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def pcm_channels(count: int, rate: int = RATE) -> bytes:
    """A WAV file of 16 bits with so many channels, 100 samples each."""
    data = bytes(200 * count)
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, count,
                       rate, rate * 2 * count % 2**32, 2 * count, 16)  # fmt: skip
    return head + struct.pack("<4sI", b"data", len(data)) + data


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
CONCAT = b"ffconcat version 1.0\nfile '/etc/passwd'\n"
FAULTS: list[tuple[str, Any, type[OmniqError], str]] = [
    ("audio", pcm_channels(9), InvalidRequest, "must have 1 to 8 channels, has 9"),
    ("audio", pcm_channels(255), InvalidRequest, "must have 1 to 8 channels, has 255"),
    ("audio", pcm_channels(1, 5), InvalidRequest, "1000 to 384000 samples a second, has 5"),
    ("audio", pcm_channels(1, 2**31 - 1), InvalidRequest, "samples a second, has 2147483647"),
    ("audio", pcm_float([]), InvalidRequest, "holds no samples"),
    ("audio", b"", UnsupportedInput, "must be WAV, FLAC"),
    ("audio", empty_wav(b""), InvalidRequest, "holds no samples"),
    ("audio", empty_wav(b"LIST" + struct.pack("<I", 10) + bytes(10)), InvalidRequest, "no samples"),
    ("audio", b"\xff\xf1", InvalidRequest, "holds no sound"),
    ("audio", b"\xff\xfb" + bytes(30), UnsupportedInput, "must be WAV, FLAC"),
    ("audio", encoded(np.ones(1, np.int16), RATE, "opus", OutputContext("j")), InvalidRequest,
     "the sound is too short: 3 samples at 48000 hertz"),
    ("audio", b"no sound at all" * 50, UnsupportedInput, "must be WAV, FLAC"),
    ("audio", picture(), UnsupportedInput, "must be WAV, FLAC"),
    ("audio", PLAYLIST, UnsupportedInput, "must be WAV, FLAC"),
    ("audio", CONCAT, UnsupportedInput, "must be WAV, FLAC"),
    ("video", PLAYLIST, UnsupportedInput, "must be MP4"),
    ("video", CONCAT, UnsupportedInput, "must be MP4"),
    ("video", picture(), UnsupportedInput, "must be MP4"),
    ("audio", video(), InvalidRequest, "the file holds no sound"),
    ("video", remuxed(sound("aac"), "mp4"), InvalidRequest, "the file holds no video"),
    ("video", mjpeg(), UnsupportedInput, "mjpeg is not read"),
    ("audio", sound("wav", seconds=1.6), InputTooLarge, "must last at most 1.5 s"),
    ("audio", sound("opus", seconds=1.9), InputTooLarge, "must last at most 1.5 s"),
    ("audio", pcm_float([0.1, float("nan")]), InvalidRequest, "NaN or infinite"),
    ("video", video(frames(13)), InputTooLarge, "must have at most 12 frames"),
    ("video", video(frames(2, 48, 48)), InputTooLarge, "at most 2000 pixels a frame, has 48 x 48"),
    ("audio", "http://example.com/a.wav", InvalidRequest, "nothing is fetched"),
    ("audio", {"sample": 1}, InvalidRequest, "an object names a result file"),
    ("audio", [sound("wav")] * 3, InvalidRequest, "must have 1 to 2 sounds, has 3"),
    ("video", [video()] * 2, InvalidRequest, "must have 1 to 1 videos, has 2"),
    ("audio", 3, InvalidRequest, "must be sound, not int"),
    ("video", True, InvalidRequest, "must be a video, not bool"),
    ("file", [video(), b"x"], InvalidRequest, "must have 1 to 1 videos, has 2"),
    ("file", picture(), UnsupportedInput, "must be MP4"),
    ("file", mjpeg(), UnsupportedInput, "mjpeg is not read"),
    ("file", video(frames(2, 48, 48)), InputTooLarge, "at most 2000 pixels a frame, has 48 x 48"),
    ("file", 3, InvalidRequest, "must be a video file, not int"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "kind", "text"), FAULTS, ids=range(len(FAULTS)))
async def test_what_cannot_be_used_is_refused(
    name: str, value: Any, kind: type[OmniqError], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        await read(value, name)
    assert type(caught.value) is kind
    assert caught.value.message.startswith(f"input.{name}")


@pytest.mark.parametrize("name", ["audio", "video"])
async def test_arrays_of_another_form_are_refused(name: str) -> None:
    for wrong in (np.zeros((2, 2), np.float64), np.zeros((3, 4, 5, 2), np.uint8)):
        with pytest.raises(InvalidRequest, match="an array must be"):
            await read(wrong, name, local=True)
    if name == "video":
        with pytest.raises(InputTooLarge, match="at most 12 frames"):
            await read(frames(13), name, local=True)


async def test_settings_bound_what_pipelines_allow(setting: Any) -> None:
    setting(max_media_seconds=0.2)
    with pytest.raises(InputTooLarge, match=r"at most 0\.2 s"):
        await read(sound("wav"))
    setting(max_media_seconds=60)
    setting(max_decode_seconds=1e-6)
    for name, data in (("audio", sound("wav")), ("video", video())):
        with pytest.raises(InputTooLarge, match="takes longer than 1e-06 s to decode"):
            await read(data, name)
    setting(max_decode_seconds=30)
    setting(redis_blob_max_bytes=4096 + 32 * 48 * 3 * 5)
    with pytest.raises(InputTooLarge, match="more than 23040 bytes decoded"):
        await read(video(), "video")


async def test_a_small_file_that_claims_large_frames_takes_no_memory() -> None:
    """The size is in the stream's own header, too, which is not the container's."""
    import resource

    data = video(frames(2, 2048, 2048))
    at = data.index(b"avc1", data.index(b"stsd")) + 4 + 24
    assert struct.unpack(">HH", data[at : at + 4]) == (2048, 2048)
    lie = data[:at] + struct.pack(">HH", 16, 16) + data[at + 4 :]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((InputTooLarge, InvalidRequest)):
        await read(lie, "video")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "KiB"


@pytest.mark.parametrize("count", range(1, 9))
async def test_up_to_eight_channels_are_read(count: int) -> None:
    assert len(await array(pcm_channels(count))) == 100


async def test_cut_files_are_an_error_or_shorter(tmp_path: Path) -> None:
    """Never anything else."""
    for name, data in (
        ("audio", sound("wav")),
        ("audio", sound("mp3")),
        ("audio", sound("opus")),
        ("audio", remuxed(sound("aac"), "mp4")),
        ("video", video()),
    ):
        for part in range(1, 12):
            try:
                await read(data[: len(data) * part // 12], name)
            except InvalidRequest as exc:
                assert exc.message.startswith(f"input.{name}")


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus", "aac"])
async def test_a_few_samples_are_sound(form: str) -> None:
    """FFmpeg cannot tell the format of one or two frames by itself."""
    random = np.random.default_rng(2)
    for count in (1, 50, 500, 1100) if form != "opus" else (200, 1100):
        samples = (random.standard_normal(count) * 3000).astype(np.int16)
        found = await array(encoded(samples, RATE, form, OutputContext("j")))
        assert count <= len(found) <= count + 3000


def test_wav_of_python_is_read_too() -> None:
    """Another writer than ours."""
    import asyncio

    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1), out.setsampwidth(3), out.setframerate(RATE)
        out.writeframes(b"\x00\x00\x40" * 100)
    samples = asyncio.run(array(file.getvalue()))
    assert np.allclose(samples, 0.5) and len(samples) == 100
