"""Makes ``import vllm_omni`` find omniq's stand-in, unless a real vllm-omni is installed.

``vllm serve MODEL --omni`` hands over to ``vllm_omni.entrypoints.cli.main`` if a package of that
name can be imported. omniq installs no such package: pip lets the later of two packages overwrite
the files of the earlier one. Instead ``omniq_vllm_omni.pth`` has every Python of the environment
append this finder behind the usual ones, so that a real ``vllm_omni``, wherever it is on
``sys.path``, is found first, and neither installing nor removing omniq touches its files.

Every start of Python imports this module: it may import nothing that is not loaded anyway, and for
that reason lies beside omniq, not in it.
"""

import sys

NAME = "vllm_omni"


class VllmOmniFinder:
    """A meta path finder (``importlib.abc.MetaPathFinder``) of that one package."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> object:
        """The stand-in's spec for ``vllm_omni`` itself; None for anything else."""
        if fullname != NAME:
            return None
        from importlib.util import find_spec, spec_from_file_location  # noqa: PLC0415
        from pathlib import Path  # noqa: PLC0415

        omniq = find_spec("omniq")
        if omniq is None or omniq.origin is None:
            return None
        folder = Path(omniq.origin).parent / "compat" / NAME
        return spec_from_file_location(
            NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


sys.meta_path.append(VllmOmniFinder)  # type: ignore[arg-type]
