"""The codec against every dtype and shape, the safetensors package, and hostile bytes."""

from __future__ import annotations

import gc
import json
import mmap
import struct
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.torch
import torch
from blob_tools import Tensors, assert_same, bits, make
from hypothesis import example, given, settings

from omniq.blobs import codec
from omniq.errors import BlobCorrupt, BlobError

DTYPES = sorted(codec.dtypes().values(), key=str)
#: The safetensors package writes float8_e8m0fnu, but does not read it.
STOCK_DTYPES = [d for d in DTYPES if d is not torch.float8_e8m0fnu]


def encode(tensors: Tensors) -> bytearray:
    layout = codec.plan(tensors)
    data = bytearray(layout.nbytes)
    layout.write_into(memoryview(data))
    return data


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern, NaNs of every kind included; bools are 0 or 1."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool)).reshape(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    raw = torch.from_numpy(rng.integers(0, 256, count * dtype.itemsize).astype(np.uint8))
    return raw.view(dtype).reshape(shape)


@st.composite
def any_tensor(draw: st.DrawFn, dtypes: list[torch.dtype]) -> torch.Tensor:
    """0-d, empty, contiguous, transposed, strided, offset or expanded."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    tensor = random_tensor(draw(st.sampled_from(dtypes)), shape, draw(st.integers(0, 2**32)))
    form = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "offset"]))
    if shape and form == "transposed":
        return tensor.transpose(0, -1)
    if shape and form == "strided":
        return tensor[::2]
    if shape and form == "offset":
        return tensor[1:]
    if form == "expanded":
        return tensor.expand(3, *shape)
    return tensor


def any_tensors(dtypes: list[torch.dtype] = DTYPES) -> st.SearchStrategy[Tensors]:
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    return st.dictionaries(
        names.filter(lambda n: n != "__metadata__"), any_tensor(dtypes), max_size=6
    )


# -- round trips -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(any_tensors())
@example({"one element that a stride passes for contiguous": torch.zeros(2, 3)[:1, ::3]})
def test_what_is_written_is_read(tensors: Tensors) -> None:
    """Bit for bit, whatever the dtype, shape and strides, from both ways of writing."""
    data = encode(tensors)
    assert_same(codec.parse(data), tensors)
    layout = codec.plan(tensors)
    assert b"".join(layout.buffers()) == data
    assert len(data) == layout.nbytes
    assert len(layout.header) % codec.ALIGNMENT == 0


@settings(deadline=None)
@given(any_tensors(STOCK_DTYPES))
def test_the_safetensors_package_reads_what_is_written(tensors: Tensors) -> None:
    stock = safetensors.torch.load(bytes(encode(tensors)))
    assert_same({name: stock[name] for name in tensors}, tensors)


@settings(deadline=None)
@given(any_tensors(), st.none() | st.dictionaries(st.text("ab", min_size=1), st.text("é\n")))
def test_what_the_safetensors_package_writes_is_read(
    tensors: Tensors, metadata: dict[str, str] | None
) -> None:
    plain = {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    # `or None`: of no tensors and empty metadata it writes what it cannot read itself (0.8.0).
    got = codec.parse(safetensors.torch.save(plain, metadata or None))
    assert_same({name: got[name] for name in plain}, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_megabytes_of_it(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, (1024, 1024), 1).T
    assert_same(codec.parse(encode({"a": tensor})), {"a": tensor})


def test_blobs_above_four_gigabytes_lie_where_they_should(tmp_path: Path) -> None:
    """No offset is cut to 32 bits: written by plan, and read from a file that is mostly a hole."""
    huge = torch.zeros(1, dtype=torch.int16).expand(3 << 30)
    tail = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    plan = codec.plan({"huge": huge, "tail": tail})
    assert plan.nbytes == len(plan.header) + (6 << 30) + 6
    spans = sorted((part.start, part.end) for part in plan.parts)
    assert spans == [
        (len(plan.header), len(plan.header) + (6 << 30)),
        (len(plan.header) + (6 << 30), plan.nbytes),
    ]
    with (tmp_path / "blob").open("w+b") as file:
        file.truncate(plan.nbytes)
        file.write(plan.header)
        file.seek(spans[0][1] - 2)
        file.write(b"\x07\x00" + bytes(range(6)))
        file.flush()
        got = codec.parse(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
    assert got["huge"].shape == huge.shape
    assert got["huge"][[0, 1 << 31, -1]].tolist() == [0, 0, 7]
    assert_same({"tail": got["tail"]}, {"tail": tail})


def test_all_dtypes_of_the_format_that_torch_has_are_known() -> None:
    assert set(safetensors.torch._SIZE) - {torch.float4_e2m1fn_x2} == set(DTYPES)


def test_conjugate_negative_and_gradient_views_are_written_as_they_look() -> None:
    c = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    tensors = {"conj": c.conj(), "neg": c.conj().imag, "grad": torch.ones(2, requires_grad=True)}
    got = codec.parse(encode(tensors))
    assert got["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert got["neg"].tolist() == [-2, 4]
    assert got["grad"].tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_on_a_gpu_are_written_as_they_are(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, (64, 64), 1)
    tensors = {"plain": tensor, "strided": tensor.T[::2], "empty": tensor[:0], "0d": tensor[0, 0]}
    layout = codec.plan({name: t.cuda() for name, t in tensors.items()})
    data = bytearray(layout.nbytes)
    layout.write_into(memoryview(data))
    assert_same(codec.parse(data), tensors)
    assert b"".join(layout.buffers()) == data


def test_views_are_of_the_buffer_and_keep_it() -> None:
    data = np.frombuffer(bytes(encode(make(4096))), np.uint8).copy()
    view = codec.parse(data)["x"]
    data[-1] ^= 0xFF
    assert view[-1] == data[-1]
    expected = bits(view)
    del data
    gc.collect()
    assert bits(view) == expected


def test_read_only_buffers_are_read_in_threads_without_warnings() -> None:
    """torch warns of the first read-only buffer, and would again: `set_warn_always`."""
    data = bytes(encode(make()))
    seen: list[Any] = []
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")

            def read() -> None:
                seen.append(bits(codec.parse(data)["x"]))

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        torch.set_warn_always(False)
    assert seen == [data[-1024:]] * 4


def test_larger_elements_come_first_and_names_keep_their_order() -> None:
    tensors = {
        "byte": torch.ones(3, dtype=torch.uint8),
        "double": torch.ones(1, dtype=torch.float64),
        "half": torch.ones(1, dtype=torch.float16),
    }
    got = codec.parse(encode(tensors))
    assert list(got) == list(tensors)
    assert all(t.data_ptr() % t.element_size() == 0 for t in got.values())


def test_a_misaligned_tensor_of_another_writer_is_read() -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    data = b"\x07" + struct.pack("<ff", 1.5, -2)
    for buffer in (raw(header, data), bytearray(raw(header, data))):
        got = codec.parse(buffer)
        assert got["b"].data_ptr() % 4 == 0
        assert (got["a"].tolist(), got["b"].tolist()) == ([7], [1.5, -2])


def test_a_description_names_dtype_and_shape_and_stays_small() -> None:
    many = {f"t{n}": torch.zeros(n, 2) for n in range(100)}
    described = codec.plan(many).described
    assert described["t3"] == "float32[3,2]"
    assert len(described) == codec.MAX_DESCRIBED
    scalar = {"s": torch.zeros((), dtype=torch.bfloat16)}
    assert codec.plan(scalar).described == {"s": "bfloat16[]"}


# -- what cannot be written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("x", torch.zeros(2, dtype=torch.complex128)),
        ("x", torch.zeros(2, device="meta")),
        ("x", torch.zeros(2, 2).to_sparse()),
        ("x", [1, 2]),
        ("__metadata__", torch.zeros(2)),
        ("\ud800", torch.zeros(2)),
        ("x", torch.zeros([1] * 65)),
        ("x" * (codec.MAX_HEADER_BYTES + 1), torch.zeros(1)),
    ],
    ids=["dtype", "meta", "sparse", "list", "reserved", "name", "dims", "header"],
)
def test_what_cannot_be_stored_is_refused(name: str, tensor: Any) -> None:
    with pytest.raises(BlobError):
        codec.plan({name: tensor})


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(BlobError, match="65537 tensors"):
        codec.plan(dict.fromkeys(map(str, range(codec.MAX_TENSORS + 1)), torch.zeros(0)))


def test_a_buffer_that_is_too_small_is_not_written_to() -> None:
    layout = codec.plan(make())
    data = bytearray(layout.nbytes - 1)
    with pytest.raises(ValueError, match="do not fit"):
        layout.write_into(memoryview(data))
    assert not any(data)


# -- what is no blob -------------------------------------------------------------------------------


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}


FOUR = b"\0" * 4
AB = {
    "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    "b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]},
}


def with_b(*offsets: int) -> dict[str, Any]:
    return {**AB, "b": {**AB["b"], "data_offsets": list(offsets)}}


HOSTILE = {
    "nothing": b"",
    "short": b"\0" * 7,
    "header length lies": struct.pack("<Q", 100) + b"{}",
    "header length overflows": struct.pack("<Q", 2**64 - 1) + b"{}",
    "huge header": struct.pack("<Q", codec.MAX_HEADER_BYTES + 1) + b" " * 100,
    "no header": raw(b""),
    "no JSON": raw(b"{" + b"x"),
    "no object": raw([1]),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "UTF-16": raw("{}".encode("utf-16")),
    "deep": raw(b'{"a":' + b"[" * 100_000),
    "long number": raw(b'{"a":' + b"1" * 5000 + b"}"),
    "not finite": raw(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', FOUR),
    "duplicate name": raw(b'{"a":' + json.dumps(entry()["a"]).encode() + b',"a":{}}', FOUR),
    "duplicate field": raw(b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
    "surrogate": raw(b'{"\\ud800":' + json.dumps(entry()["a"]).encode() + b"}", FOUR),
    "no entry": raw({"a": 1}),
    "missing field": raw({"a": {"dtype": "U8", "shape": [4]}}, FOUR),
    "more fields": raw(entry(more=1), FOUR),
    "bad dtype": raw(entry(dtype="U9"), FOUR),
    "dtype no string": raw(entry(dtype=["U8"]), FOUR),
    "shape no list": raw(entry(shape=4), FOUR),
    "negative shape": raw(entry(shape=[-2, -2]), FOUR),
    "fractional shape": raw(entry(shape=[4.0]), FOUR),
    "boolean shape": raw(entry(shape=[True, 4]), FOUR),
    "shape too small": raw(entry(shape=[3]), FOUR),
    "shape too large": raw(entry(shape=[5]), FOUR),
    "shape overflows": raw(entry(shape=[2**32, 2**32, 4]), FOUR),
    "empty shape overflows": raw(entry(shape=[0, 2**62, 4], data_offsets=[0, 0])),
    "too many dimensions": raw(entry(shape=[1] * 65 + [4]), FOUR),
    "offsets no pair": raw(entry(data_offsets=[0, 2, 4]), FOUR),
    "offsets reversed": raw(entry(data_offsets=[4, 0]), FOUR),
    "offsets negative": raw(entry(data_offsets=[-4, 0]), FOUR),
    "offsets outside": raw(entry(data_offsets=[4, 8]), FOUR),
    "offsets far outside": raw(entry(data_offsets=[2**63, 2**63 + 4]), FOUR),
    "overlap": raw(with_b(1, 3), FOUR),
    "same place": raw(with_b(0, 2), b"\0" * 2),
    "gap": raw(with_b(3, 5), b"\0" * 5),
    "trailing data": raw(AB, b"\0" * 5),
    "missing data": raw(AB, b"\0" * 3),
    "metadata no strings": raw({"__metadata__": {"a": 1}}),
    "metadata no object": raw({"__metadata__": "a"}),
    "too many tensors": raw(
        {str(n): entry(shape=[0], data_offsets=[0, 0])["a"] for n in range(codec.MAX_TENSORS + 1)}
    ),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_blob_is_refused(data: bytes) -> None:
    with pytest.raises(BlobCorrupt):
        codec.parse(data)


def parse_or_refuse(data: bytes) -> None:
    """Read every byte of every tensor, so that an over-read would show."""
    try:
        got = codec.parse(data)
    except BlobCorrupt:
        return
    end = 8 + int.from_bytes(data[:8], "little")
    assert sum(len(bits(t)) for t in got.values()) == len(data) - end


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_changed_bytes_are_refused_or_read(data: st.DataObject) -> None:
    """Flips, insertions, deletions and overwritten digits, mostly in the header."""
    blob = encode({"a": torch.ones(2, 3), "bc": torch.ones(5, dtype=torch.uint8)})
    for _ in range(data.draw(st.integers(1, 4))):
        if not blob:
            break
        at = data.draw(st.integers(0, min(len(blob), 200) - 1))
        match data.draw(st.sampled_from(["flip", "insert", "delete", "digit", "cut"])):
            case "flip":
                blob[at] ^= 1 << data.draw(st.integers(0, 7))
            case "insert":
                blob[at:at] = data.draw(st.binary(max_size=8))
            case "delete":
                del blob[at : at + data.draw(st.integers(1, 8))]
            case "digit":
                blob[at] = ord("0") + data.draw(st.integers(0, 9))
            case "cut":
                del blob[data.draw(st.integers(0, len(blob))) :]
    parse_or_refuse(bytes(blob))


@settings(deadline=None, max_examples=500)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "__metadata__"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["U8", "F32", "BF16", "F4", "C64", None]),
                "shape": st.lists(st.integers(-1, 4) | st.sampled_from([2**31, 2**63]), max_size=3),
                "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3),
            }
        ),
    ),
    st.binary(max_size=40),
)
def test_made_up_headers_are_refused_or_read(header: dict[str, Any], data: bytes) -> None:
    parse_or_refuse(raw(header, data))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    parse_or_refuse(data)


def test_importing_the_package_needs_no_torch() -> None:
    code = (
        "import sys, omniq.blobs; from omniq.blobs import *; import omniq.blobs.codec;"
        "print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
