"""Settings of one omniq process, read from ``OMNIQ_*`` environment variables.

``omniq config`` prints every setting with its value, default and meaning; this module is the only
place that reads the environment.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

EMBEDDED_PORT = 6399


class Settings(BaseSettings):
    """Every knob of omniq's own processes; times in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="OMNIQ_", extra="ignore")

    broker_url: str | None = Field(
        None,
        description="Redis or Valkey to use (redis://, rediss://, redis+socket://). "
        "Unset: an embedded Valkey is started on broker_port.",
    )
    broker_port: int = Field(
        EMBEDDED_PORT, ge=1, le=65535, description="Port of the embedded Valkey, on loopback."
    )
    broker_maxmemory: str = Field("2gb", description="maxmemory of the embedded Valkey.")
    data_dir: Path = Field(
        Path("run"), description="Where the embedded Valkey keeps its append-only file, and logs."
    )
    namespace: str = Field(
        "omniq",
        pattern=r"^[a-z][a-z0-9_-]{0,31}$",
        description="Prefix of queues, Redis keys and shared-memory segments; "
        "two systems on one Redis need two namespaces.",
    )

    pipelines: list[str] = Field(
        default_factory=list,
        description="Pipeline files or folders of *.yaml beside the built-in ones (JSON list).",
    )
    default_pipeline: str = Field("tiny-omni", description="Pipeline that `omniq up` serves.")

    api_host: str = Field("127.0.0.1", description="Address the API listens on.")
    api_port: int = Field(8000, ge=1, le=65535, description="Port the API listens on.")
    api_keys: list[str] = Field(
        default_factory=list,
        description="Keys of which clients must send one as 'Authorization: Bearer KEY' to every "
        "route below /v1 (JSON list): the operator's, who has no share to keep; see api_auth.",
    )
    api_auth: Literal["auto", "required"] = Field(
        "auto",
        description="'required': the routes below /v1 want a key even while there is none; 'auto': "
        "as soon as there is one, in api_keys or made by `omniq keys create`.",
    )
    served_models: dict[str, str] = Field(
        default_factory=dict,
        description="More model names of the OpenAI-compatible routes, and the pipeline each means "
        "(JSON object); pipeline names are model names anyway.",
    )
    openai_role: str = Field(
        "assistant", min_length=1, description="Role of answers on the OpenAI-compatible routes."
    )
    openai_tokens_as_ids: bool = Field(
        False, description="Log probabilities there name tokens as 'token_id:N'."
    )
    openai_always_usage: bool = Field(
        False, description="Streams there end with usage, asked for or not."
    )
    openai_keep_alive: float = Field(
        15.0,
        ge=0,
        description="Seconds without news after which streams there send a comment; 0: never.",
    )
    max_prompt_chars: int = Field(
        100_000, gt=0, description="Longest text input that any pipeline accepts."
    )
    max_body_bytes: int = Field(
        32 << 20, gt=0, description="Largest request body the API reads; more is answered 413."
    )
    body_timeout: float = Field(
        300.0,
        gt=0,
        description="Within so long a request's body must have come whole; else it is answered "
        "408.",
    )

    max_input_bytes: int = Field(
        32 << 20, gt=0, description="Largest file among a request's inputs."
    )
    max_image_pixels: int = Field(
        1 << 24,
        gt=0,
        description="Most pixels of a picture, or of a frame, among a request's inputs; looked at "
        "before it is decoded.",
    )

    max_jobs: int = Field(
        10_000,
        gt=0,
        description="Most unfinished jobs of one pipeline whose file says no max_jobs; more are "
        "answered 503 with Retry-After.",
    )
    max_waiting: int = Field(
        10_000,
        gt=0,
        description="Most messages that may wait for a stage whose file says no max_waiting.",
    )
    max_waiting_input_bytes: int = Field(
        1 << 30, gt=0, description="Most bytes of the input files of all unfinished jobs."
    )
    broker_watermark: float = Field(
        0.85,
        gt=0,
        le=1,
        description="No job is accepted while the broker uses more than this part of its "
        "maxmemory, or while a host's shared memory is as full.",
    )
    fair_window: int = Field(
        64,
        gt=0,
        description="Once there are tenants: messages in a stage's queue above which a pipeline's "
        "jobs are held back and let go in turn; at least twice the stages' max_in_flight.",
    )
    idempotency_ttl: float = Field(
        86_400.0, gt=0, description="An idempotency key is known so long after its first use."
    )

    webhook_allow: list[str] = Field(
        default_factory=lambda: ["*"],
        description="Hosts that webhooks may name (JSON list): '*' (any that is public), names, "
        "'*.name', and addresses or networks, which alone may be private.",
    )
    webhook_schemes: list[Literal["https", "http"]] = Field(
        ["https"], description="URL schemes of webhooks (JSON list)."
    )
    webhook_timeout: float = Field(
        10.0, gt=0, description="Seconds a webhook's receiver may take to answer."
    )

    flower_port: int = Field(5555, ge=1, le=65535, description="Port Flower listens on (loopback).")
    flower_auth: str | None = Field(
        None, description="user:password for Flower's basic auth; unset: a new one each start."
    )

    remote_media: list[str] = Field(
        default_factory=list,
        description="Hosts from which files of a request may be fetched (JSON list): a name, "
        "*.name, an address or a network; '*' is any public one. Empty: none.",
    )
    remote_timeout: float = Field(
        20.0, gt=0, description="Longest time that fetching one such file may take, in seconds."
    )
    max_media_seconds: float = Field(
        600.0, gt=0, description="Longest sound or video among a request's inputs."
    )
    max_decode_seconds: float = Field(
        30.0, gt=0, description="Longest time that decoding one sound or video may take."
    )
    embed_metadata: bool = Field(
        True,
        description="Result files say how they were made: prompt, seed, parameters, pipeline, job.",
    )

    visibility_timeout: float = Field(
        4.0,
        gt=1,
        description="A task whose worker has not renewed its lease for so long is delivered again.",
    )
    stall_timeout: float = Field(
        10.0,
        gt=1,
        description="A worker whose engine loop has not turned for so long loses its tasks to "
        "others. Single steps of a model may take longer: they do not run on that loop.",
    )
    hang_timeout: float = Field(
        120.0,
        gt=1,
        description="A worker whose engine loop has not turned for so long is ended, with the "
        "stacks of its threads in its log; `omniq worker --restart` starts another.",
    )
    reconcile_interval: float = Field(
        5.0,
        gt=0,
        description="So often one of a pipeline's workers looks for jobs whose message was lost, "
        "and that have not changed for as long; it sends the message again.",
    )
    heartbeat: float = Field(2.0, gt=0, description="How often workers say they are alive.")
    drain_seconds: float = Field(
        3.0,
        ge=0,
        description="On SIGTERM running tasks get so long to end; the rest go back to the queue. "
        "Keep it below the supervisor's kill time (honcho: 5 s).",
    )
    ready_timeout: float = Field(
        300.0, gt=0, description="How long a starting system waits for all stages."
    )

    retention: float = Field(
        86_400.0, gt=0, description="Finished jobs, their events and artifacts are kept so long."
    )
    job_ttl: float = Field(
        7 * 86_400.0, gt=0, description="An unfinished job's record is dropped after so long."
    )
    tombstones: float = Field(
        7 * 86_400.0,
        ge=0,
        description="Jobs that are no longer kept are answered 410, not 404, at least so long.",
    )
    dead_letter_retention: float = Field(
        7 * 86_400.0,
        gt=0,
        description="Jobs that failed for good, other than by their request, can be tried again "
        "for so long (`omniq dlq`).",
    )
    max_dead_letters: int = Field(
        10_000, gt=0, description="Most of them kept; the oldest go first."
    )
    max_artifact_bytes: int = Field(256 << 20, gt=0, description="Largest single artifact.")
    max_events: int = Field(
        10_000, gt=0, description="Events kept per job; older ones are trimmed."
    )

    message_keys: list[Annotated[str, Field(min_length=16)]] = Field(
        default_factory=list,
        description="Secrets, 16 characters at least, with which task messages are signed (JSON "
        "list): by the first; workers refuse what none of them has signed. The same in all "
        "processes that send or take tasks. Empty: messages are neither signed nor looked at.",
    )

    blob_store: Literal["auto", "shm", "redis"] = Field(
        "auto",
        description="Where tensors travel: auto takes shared memory when every live consumer is "
        "on the producer's host, Redis otherwise.",
    )
    shm_dir: Path = Field(Path("/dev/shm"), description="Folder of the shared-memory store.")
    shm_max_bytes: int = Field(
        8 << 30, gt=0, description="Most bytes of shared memory this namespace may hold per host."
    )
    blob_redis_url: str | None = Field(
        None,
        description="Redis or Valkey for blobs only, best without an append-only file; the same in "
        "all processes. Unset: the broker.",
    )
    redis_blob_max_bytes: int = Field(
        512 << 20, gt=0, description="Largest blob the Redis store accepts."
    )
    redis_ca: Path | None = Field(
        None,
        description="Certificates (PEM file) that rediss:// servers are checked against; unset: "
        "the system's.",
    )
    blob_ttl: float = Field(
        86_400.0, gt=0, description="A blob that no job frees is dropped from Redis after so long."
    )

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Log level of workers and API."
    )

    @field_validator("api_keys")
    @classmethod
    def _can_be_sent(cls, value: list[str]) -> list[str]:
        if not all(map(can_be_sent, value)):
            raise ValueError("must be keys that are not empty, without spaces around them")
        return value

    @field_validator("broker_url", "blob_redis_url")
    @classmethod
    def _known_scheme(cls, value: str | None) -> str | None:
        schemes = ("redis://", "rediss://", "redis+socket://")
        if value is not None and not value.startswith(schemes):
            raise ValueError(f"must start with one of {', '.join(schemes)}")
        if value is not None:
            _check_url(value)
        return value

    @property
    def embedded(self) -> bool:
        """Whether this system runs its own Valkey."""
        return self.broker_url is None

    @property
    def url(self) -> str:
        """The broker URL in kombu's spelling, embedded or configured."""
        return self._encrypted(self.broker_url or f"redis://127.0.0.1:{self.broker_port}/0")

    @property
    def redis_url(self) -> str:
        """The same broker in redis-py's spelling (``unix://`` for sockets)."""
        return _redis_spelling(self.url)

    @property
    def blob_url(self) -> str:
        """The server for blobs, in redis-py's spelling."""
        return _redis_spelling(self._encrypted(self.blob_redis_url or self.url))

    def _encrypted(self, url: str) -> str:
        """A ``rediss://`` URL that says how the server's certificate is checked: always, unless the
        URL itself says otherwise. redis-py, kombu and Celery read it there.
        """
        if not url.startswith("rediss://"):
            return url
        more = {"ssl_cert_reqs": "required"}
        if self.redis_ca is not None:
            more["ssl_ca_certs"] = str(self.redis_ca)
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        return urlunsplit(parts._replace(query=urlencode({**more, **given})))


def can_be_sent(key: str) -> bool:
    """Whether a client can send it as its API key; an empty one would be that of everybody who
    sends none.
    """
    return bool(key) and key == key.strip()


def _check_url(url: str) -> None:
    """Raise ValueError for what redis-py would stumble over at its first command."""
    parts = urlsplit(url)
    if parts.scheme == "redis+socket":
        return
    _ = parts.port  # raises what is wrong with it
    if not parts.hostname:
        raise ValueError("must name a host")
    database = parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        raise ValueError(f"must end with the number of a database, not {database!r}")


def _redis_spelling(url: str) -> str:
    return url.replace("redis+socket://", "unix://", 1)


def unknown_variables() -> dict[str, str | None]:
    """``OMNIQ_...`` variables of the environment that are no setting, each with the setting whose
    name is most like it; None: no name is.
    """
    known = {f"OMNIQ_{name.upper()}" for name in Settings.model_fields}
    unknown = sorted(n for n in os.environ if n.upper().startswith("OMNIQ_"))
    return {
        name: next(iter(get_close_matches(name.upper(), known, n=1)), None)
        for name in unknown
        if name.upper() not in known
    }


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The process's settings, read once."""
    return Settings()
