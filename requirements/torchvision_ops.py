"""Lets torchvision be imported beside a torch that its compiled part was not built for.

PyPI's torchvision is built for CUDA. Beside torch's CPU build its ``_C.so`` cannot be loaded, and
the import ends with "operator torchvision::nms does not exist", though the transforms that
processors of pictures and video use are Python on torch's own ops. Where ``_C.so`` cannot be
loaded, the two ops that the import asks for are declared here without a kernel: what needs them
still fails, by name.

Only of the test environment: ``make install-test`` puts it into site-packages, with a ``.pth`` file
that imports it in every process.
"""

import ctypes
import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Ops(importlib.abc.MetaPathFinder):
    """Finds nothing: it declares the ops when torchvision is about to be imported, and is gone."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.origin is not None:
                _declare_unless_built(Path(spec.origin).with_name("_C.so"))


def _declare_unless_built(library: Path) -> None:
    import torch

    try:
        ctypes.CDLL(str(library))
    except OSError:
        # Lives as long as the process: what it declares is gone with it.
        _Ops.declared = torch.library.Library("torchvision", "DEF")  # type: ignore[attr-defined]
        for op in OPS:
            _Ops.declared.define(op)  # type: ignore[attr-defined]


sys.meta_path.insert(0, _Ops())
