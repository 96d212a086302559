"""A whole system for requests at random: the API, and a worker for each kind of result."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import redis
from omniq_process import OmniqProcess, omniq_processes
from support import Valkey, free_port, wait_until

#: The operator's API key.
SECRET = "the-operators-key"
KEY = {"authorization": f"Bearer {SECRET}"}
#: Dead letters that are there from the beginning.
LETTERS = 5
ENGINE = (
    'engine: "stand_in_engines:Everything", model: none, max_in_flight: 8, retry: {max_retries: 0}'
)
#: A pipeline for each kind of result; together they have inputs of every type.
PIPELINES = {
    "talk": """
inputs:
  prompt: {type: text, required: false, max_length: 500}
  messages: {type: messages, required: false}
  ids: {type: token_ids, required: false}
  image: {type: image, required: false, max_items: 2, max_pixels: 5000}
  sound: {type: audio, required: false, max_seconds: 1}
  clip: {type: video, required: false, max_frames: 8, max_pixels: 5000}
stages:
  - {stage_id: make, engine_type: AR, output_modalities: [text], %s}
edges:
  - {from: input.prompt, to: make.prompt}
  - {from: input.messages, to: make.messages}
  - {from: input.ids, to: make.ids}
  - {from: input.image, to: make.image}
  - {from: input.sound, to: make.sound}
  - {from: input.clip, to: make.clip}
outputs:
  text: {from: make.text, type: text}
""",
    "paint": """
inputs:
  prompt: {type: text, max_length: 500}
  image: {type: image, required: false, max_pixels: 5000}
  mask: {type: image, required: false, max_pixels: 5000}
stages:
  - {stage_id: make, engine_type: DiT, output_modalities: [image], %s}
edges:
  - {from: input.prompt, to: make.prompt}
  - {from: input.image, to: make.image}
  - {from: input.mask, to: make.mask_image}
outputs:
  image: {from: make.image, type: image}
""",
    "speak": """
inputs:
  script: {type: text, max_length: 500}
  voice: {type: text, required: false, max_length: 20}
stages:
  - {stage_id: make, engine_type: AR, output_modalities: [audio], %s}
edges:
  - {from: input.script, to: make.text}
  - {from: input.voice, to: make.voice}
outputs:
  voice: {from: make.audio, type: audio, sample_rate: 16000}
""",
    "embed": """
inputs:
  prompt: {type: text, required: false, max_length: 500}
  ids: {type: token_ids, required: false}
stages:
  - {stage_id: make, engine_type: AR, output_modalities: [pooling], %s}
edges:
  - {from: input.prompt, to: make.prompt}
  - {from: input.ids, to: make.ids}
outputs:
  vector: {from: make.pooling, type: pooling}
""",
}


@dataclass
class FuzzedSystem:
    """What is asked, and what is looked at meanwhile."""

    url: str
    broker: redis.Redis
    api: OmniqProcess
    workers: list[OmniqProcess]


@contextlib.contextmanager
def fuzzed_system(folder: Path, valkey: Valkey, **settings: str) -> Iterator[FuzzedSystem]:
    """The API and its workers, once all are ready."""
    made = folder / "pipelines"
    made.mkdir()
    for name, text in PIPELINES.items():
        (made / f"{name}.yaml").write_text(f"name: {name}\n{text % ENGINE}")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = {
        "OMNIQ_BROKER_URL": valkey.url,
        "OMNIQ_PIPELINES": json.dumps([str(made)]),
        "OMNIQ_DEFAULT_PIPELINE": "talk",
        "OMNIQ_API_KEYS": json.dumps([SECRET]),
        "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        **settings,
    }
    with omniq_processes(folder) as start:
        workers = [start("worker", "--pipeline", n, "--stage", "make", **env) for n in PIPELINES]
        api = start("api", "--port", str(port), **env)

        def up() -> bool:
            for each in (api, *workers):
                assert each.process.poll() is None, each.output()
            with contextlib.suppress(httpx.TransportError):
                found = httpx.get(f"{url}/ready").json().get("pipelines", {})
                return all(found.get(name, {}).get("ready") for name in PIPELINES)
            return False

        wait_until(up, 60, "all stages are ready")
        _fail(url, LETTERS)
        yield FuzzedSystem(url, redis.Redis(port=valkey.port), api, workers)


def _fail(url: str, count: int) -> None:
    """Have some dead letters that may be read, retried and dropped."""
    body = {"pipeline": "talk", "input": {"prompt": "fail"}}
    with httpx.Client(base_url=url, headers=KEY, timeout=30) as client:
        for _ in range(count):
            answer = client.post("/v1/jobs", params={"wait": 20}, json=body)
            assert answer.json()["state"] == "failed", answer.text
