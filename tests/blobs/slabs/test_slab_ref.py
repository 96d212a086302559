"""The quick ways to make, write and read a reference are the usual ones."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from omniq.blobs.base import BlobRef

FIELDS = {
    "id": "j.ar.1.hidden",
    "store": "shm",
    "host": "h",
    "nbytes": 5,
    "place": "00ff.0.1.2",
    "tensors": {"é": "float32[1]"},
}


def test_quick_and_usual_agree() -> None:
    ref = BlobRef.from_fields(dict(FIELDS))
    assert ref == BlobRef(**FIELDS)
    assert ref.to_json().decode() == ref.model_dump_json()
    assert BlobRef.from_json(ref.to_json()) == BlobRef.model_validate_json(ref.to_json()) == ref


@pytest.mark.parametrize(
    "fault", [{"id": "a b"}, {"nbytes": -1}, {"more": 1}, {"tensors": [1]}, {"place": 7}]
)
def test_what_is_no_reference_is_refused(fault: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        BlobRef.from_fields({**FIELDS, **fault})
    with pytest.raises(ValidationError):
        BlobRef.from_json(b"[]")
