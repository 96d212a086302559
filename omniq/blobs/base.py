"""Blobs: immutable named tensors under a key, written once by one stage and read by the next."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import torch


#: ``BlobRef.host`` of what lies on a Redis server for blobs only.
REDIS_HOST = "redis"


class BlobRef(BaseModel):
    """What a message carries instead of tensors.

    ``store`` says where the blob was written (``shm`` or ``redis``); ``host`` is the identity of
    the machine whose shared memory holds it, or :data:`REDIS_HOST`. A reader tries Redis when
    shared memory does not have it (any more): a worker that stops moves its blobs there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,200}$")
    store: str
    host: str | None = None
    nbytes: int = Field(ge=0)
    place: str | None = Field(None, description="Where in the host's shared memory it lies.")
    checksum: str | None = Field(None, description="xxh3-64 of the bytes, hex.")
    tensors: dict[str, str] = Field(
        default_factory=dict, description="For people: name -> 'float32[1,16,8,8]'."
    )

    # A reference is made, written and read for every hop: the same as calling the class,
    # `model_dump`, `model_dump_json` and `model_validate_json`, without the options that those
    # look at.

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> BlobRef:
        """A reference with these fields.

        Raises:
            pydantic.ValidationError: they are not those of a reference.
        """
        ref: BlobRef = cls.__pydantic_validator__.validate_python(fields)
        return ref

    def to_fields(self) -> dict[str, Any]:
        """All fields; the inverse of :meth:`from_fields`."""
        return self.__dict__.copy()

    def to_json(self) -> bytes:
        """All fields."""
        return orjson.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: bytes | str) -> BlobRef:
        """The inverse of :meth:`to_json`.

        Raises:
            pydantic.ValidationError: not the JSON of a reference.
        """
        ref: BlobRef = cls.__pydantic_validator__.validate_json(text)
        return ref


class BlobStore(abc.ABC):
    """One place where blobs live. All methods are blocking and safe to call from any thread."""

    name: str

    @abc.abstractmethod
    def put(self, blob_id: str, tensors: Mapping[str, torch.Tensor]) -> BlobRef:
        """Write once.

        Raises:
            BlobTooLarge: above the store's limit for one blob.
            StoreFull: no room now.
        """

    @abc.abstractmethod
    def get(self, ref: BlobRef) -> dict[str, torch.Tensor]:
        """Read; the tensors are read-only by contract and stay valid after :meth:`delete`.

        Raises:
            BlobNotFound: not (or no longer) here.
            BlobCorrupt: length, header or checksum do not fit.
        """

    @abc.abstractmethod
    def delete(self, ref: BlobRef) -> bool:
        """Free; False if it was not here."""

    def close(self) -> None:  # noqa: B027 - not every store holds something
        """Release what the store object itself holds; blobs stay."""

    def stats(self) -> dict[str, Any]:
        """Numbers for ``omniq inspect``."""
        return {}
