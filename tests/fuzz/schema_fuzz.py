"""schemathesis over the OpenAPI document of a running system.

Its configuration is ``schemathesis.toml``, with ``fuzz_hooks.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from fuzz_hooks import REPORT
from fuzz_system import SECRET
from runs import Report

HERE = Path(__file__).parent
FIRST = ("examples", "coverage", "fuzzing", "stateful")
#: Phases that another seed changes.
AGAIN = ("fuzzing", "stateful")


def schemathesis(
    url: str,
    folder: Path,
    *,
    examples: int,
    seed: int,
    phases: tuple[str, ...] = FIRST,
    limit: float = 600.0,
) -> Report:
    """One run; its output is the finding, if there is any.

    By one thread: several of them that make values at once trip over ``ast.parse`` of Python 3.11
    (``SystemError: AST constructor recursion depth mismatch``). Run several, with other seeds.

    Args:
        examples: for each operation, in each phase that makes any at random.
        folder: for what it writes.
        limit: seconds after which the run itself counts as hanging.
    """
    told = folder / "answers.json"
    told.unlink(missing_ok=True)
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "--no-color"),
        *("--config-file", str(HERE / "schemathesis.toml")),
        *("run", f"{url}/openapi.json", "--phases", ",".join(phases)),
        *("--max-examples", str(examples), "--seed", str(seed)),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "FUZZ_API_KEY": SECRET,
        REPORT: str(told),
    }
    begun = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit, check=False
    )
    report = Report("schema", seconds=time.monotonic() - begun)
    if done.returncode:
        report.findings.append(f"schemathesis, seed {seed}:\n{done.stdout}{done.stderr}")
    if told.exists():
        found = json.loads(told.read_text())
        report.answers = Counter({int(status): n for status, n in found["statuses"].items()})
        report.inputs = report.answers.total()
        report.accepted = sum(n for status, n in report.answers.items() if status < 400)
        report.slowest = found["slowest"]
    return report
