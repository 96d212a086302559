"""Waveforms as sound files and as chunks."""

from __future__ import annotations

import base64
import io
import json
import sys
import wave
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sounds import av_samples, tags_of, tone

from omniq import __version__
from omniq.config import OutputConfig
from omniq.errors import ConfigError
from omniq.outputs import MultimodalOutputProcessor, OutputContext, ProcessedOutput
from omniq.outputs.base import OutputError
from omniq.outputs.sound import UNKNOWN, pcm16, wav_header
from omniq.outputs.sound_files import SoundStream, encoded, integers_of

RATE = 24_000
PROMPT = "say: é, 赤い 🙂"
CONTEXT = OutputContext("job1", PROMPT, {"talker": {"seed": 5}})
LOSSY = ("mp3", "opus", "aac")


def process(data: Any, form: str | None = None, rate: int = RATE) -> ProcessedOutput:
    return MultimodalOutputProcessor().process("speech", config(form, rate), data, CONTEXT)


def config(form: str | None = None, rate: int = RATE) -> OutputConfig:
    declared = {"from": "s.audio", "type": "audio", "sample_rate": rate, "format": form}
    return OutputConfig.model_validate(declared)


def waveform(channels: int = 1, rate: int = RATE) -> torch.Tensor:
    one = tone(rate)
    return torch.from_numpy(one if channels == 1 else np.stack([one, -one * 0.5]))


@pytest.mark.parametrize("channels", [1, 2])
def test_wav_and_flac_hold_the_same_16_bit_samples(channels: int) -> None:
    samples = waveform(channels)
    expected = np.rint(samples.numpy() * 32767).astype(np.int16)
    artifact = process({"audio": samples}).artifact
    assert artifact is not None
    assert artifact.content_type == "audio/wav"
    assert artifact.meta == {
        "format": "wav",
        "sample_rate": RATE,
        "channels": channels,
        "samples": 12_000,
        "seconds": 0.5,
    }
    with wave.open(io.BytesIO(artifact.data)) as file:  # another reader than FFmpeg
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (
            RATE,
            channels,
            2,
        )
        frames = np.frombuffer(file.readframes(1 << 20), "<i2").reshape(-1, channels).T
    assert np.array_equal(frames if channels > 1 else frames[0], expected)
    for form in ("wav", "flac"):
        file = process({"audio": samples}, form).artifact
        assert file is not None
        back, rate = av_samples(file.data)
        assert rate == RATE and np.array_equal(back, expected), form


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("form", LOSSY)
def test_lossy_files_sound_like_the_waveform(form: str, channels: int) -> None:
    samples = waveform(channels)
    artifact = process({"audio": samples}, form).artifact
    assert artifact is not None
    back, rate = av_samples(artifact.data)
    assert rate == (48_000 if form == "opus" else RATE)  # what decoders of Opus say
    heard = np.atleast_2d(back)
    heard = heard / 32768 if heard.dtype == np.int16 else heard
    assert heard.shape[0] == channels
    assert heard.shape[1] / rate == pytest.approx(0.5, abs=0.12)  # encoders fill up frames
    middle = heard[:, int(0.15 * rate) : int(0.35 * rate)]
    spectrum = np.abs(np.fft.rfft(middle[0] * np.hanning(middle.shape[1])))
    assert np.argmax(spectrum) * rate / middle.shape[1] == pytest.approx(440, abs=5)
    loudness = np.sqrt((middle**2).mean(axis=1))
    original = np.atleast_2d(samples.numpy())
    assert loudness == pytest.approx(np.sqrt((original**2).mean(axis=1)), rel=0.1)


@pytest.mark.parametrize("form", LOSSY)
@pytest.mark.parametrize("rate", [11_000, 22_050, 96_000])
def test_rates_that_an_encoder_lacks_are_resampled(form: str, rate: int) -> None:
    artifact = process({"audio": waveform(rate=rate)}, form, rate).artifact
    assert artifact is not None
    back, made = av_samples(artifact.data)
    assert np.atleast_2d(back).shape[1] / made == pytest.approx(
        0.5, abs=0.2
    )  # AAC: two frames of 93 ms
    assert artifact.meta["sample_rate"] == rate


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus"])
def test_files_say_how_they_were_made(form: str) -> None:
    artifact = process({"audio": waveform()}, form).artifact
    assert artifact is not None
    tags = tags_of(artifact.data)
    facts = json.loads(tags["comment"])
    assert facts["prompt"] == PROMPT
    assert facts["seed"] == 5
    assert facts["software"] == f"omniq {__version__}"


def test_several_waveforms_are_several_files() -> None:
    out = process({"audio": torch.zeros(2, 1, 100)})
    assert [a.name for a in out.artifacts] == ["speech", "speech-1"]
    assert [a.meta["index"] for a in out.artifacts] == [0, 1]


def test_what_is_beyond_full_scale_is_clipped_and_counted() -> None:
    artifact = process({"audio": torch.tensor([2.0, -3.0, 0.5, 1.0])}).artifact
    assert artifact is not None
    assert artifact.meta["clipped"] == 2
    assert av_samples(artifact.data)[0].tolist() == [32767, -32767, 16384, 32767]


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(10, dtype=torch.float64),
        torch.zeros(10, dtype=torch.bfloat16),
        torch.zeros(10, dtype=torch.int16),
        torch.zeros(0),
        torch.zeros(3, 10),
        torch.zeros(1, 1, 1, 10),
        torch.tensor(0.0),
    ],
)
def test_what_is_no_waveform_is_refused(data: torch.Tensor) -> None:
    processor = MultimodalOutputProcessor()
    for encode in (processor.process, processor.piece):
        with pytest.raises(
            OutputError, match=r"output 'speech': a waveform is float32 \[samples\]"
        ):
            encode("speech", config(), {"audio": data}, CONTEXT)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_no_sound(bad: float) -> None:
    processor = MultimodalOutputProcessor()
    for encode in (processor.process, processor.piece):
        with pytest.raises(
            OutputError, match="'speech': a waveform has samples that are NaN or inf"
        ):
            encode("speech", config("mp3"), {"audio": torch.tensor([0.0, bad])}, CONTEXT)


@pytest.mark.parametrize("channels", [1, 2])
def test_chunks_in_a_row_are_the_whole(channels: int) -> None:
    """A stream's header and its chunks are a WAV file with the samples of the whole."""
    samples = waveform(channels)
    processor = MultimodalOutputProcessor()
    stream = wav_header(RATE, channels)
    assert len(stream) == 44 and stream[40:44] == UNKNOWN.to_bytes(4, "little")
    for begin in range(0, 12_000, 1_777):
        chunk = {"audio": samples[..., begin : begin + 1_777]}
        value = processor.piece("speech.0", config("opus"), chunk, CONTEXT).value
        assert (value["format"], value["sample_rate"], value["channels"]) == (
            "pcm16",
            RATE,
            channels,
        )
        pcm = base64.b64decode(value["audio"])
        assert len(pcm) == 2 * channels * value["samples"]
        stream += pcm
    whole = process({"audio": samples}).artifact
    assert whole is not None
    assert stream[44:] == pcm16(samples.numpy())
    assert np.array_equal(av_samples(stream)[0], av_samples(whole.data)[0])


def test_chunk_that_is_too_long_or_several_is_refused() -> None:
    processor = MultimodalOutputProcessor()
    with pytest.raises(OutputError, match="a chunk is one waveform, not 2"):
        processor.piece("speech", config(), {"audio": torch.zeros(2, 1, 5)}, CONTEXT)
    with pytest.raises(OutputError, match="a chunk has at most 4194304 samples, not 4194306"):
        processor.piece("speech", config(), {"audio": torch.zeros(2, (1 << 21) + 1)}, CONTEXT)


def test_rate_belongs_to_sound() -> None:
    for more in ({"type": "audio"}, {"type": "image", "sample_rate": RATE}):
        with pytest.raises(ValidationError, match="'sample_rate' is given with type 'audio'"):
            OutputConfig.model_validate({"from": "s.out", **more})
    with pytest.raises(ValidationError, match="greater than or equal to 1000"):
        OutputConfig.model_validate({"from": "s.out", "type": "audio", "sample_rate": 0})


def test_formats_but_wav_name_the_extra_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr("omniq.outputs.base.find_spec", lambda name: None)
    processor = MultimodalOutputProcessor()
    processor.check("speech", config("wav"))
    assert process({"audio": waveform()}).artifact is not None
    with pytest.raises(ConfigError, match="'flac' needs PyAV") as caught:
        processor.check("speech", config("flac"))
    assert "omniq[media]" in str(caught.value.hint)


@pytest.mark.parametrize("form", ["wav", "flac", *LOSSY])
def test_files_of_a_few_samples_can_be_read_again(form: str) -> None:
    """Also those that say nothing of their format in a head, and those that a resampler shortens to
    nothing.
    """
    random = np.random.default_rng(1)
    for rate in (16_000, 22_050, 24_000, 44_100):
        for count in (1, 5, 500, 1025):
            samples = (random.standard_normal(count) * 3000).astype(np.int16)
            read, found = integers_of(encoded(samples, rate, form, CONTEXT), form)
            assert len(read) == 1
            assert read.shape[1] / found >= count / rate
            if form in ("wav", "flac"):
                assert np.array_equal(read[0], samples)
    with pytest.raises(ValueError, match=r"that can be read|no WAV file"):
        integers_of(b"", form)


@pytest.mark.parametrize("form", ["flac", *LOSSY])
def test_a_stream_without_samples_is_a_file_all_the_same(form: str) -> None:
    stream = SoundStream(form, RATE, 2)
    data = stream.feed(np.zeros((2, 0), np.int16)) + stream.finish()
    samples, rate = integers_of(data, form)
    assert samples.shape[0] == 2
    assert 0 < samples.shape[1] / rate < 0.2
    assert np.abs(samples.astype(int)).max() <= 1
