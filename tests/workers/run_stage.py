"""``run_stage.py STAGE``: a worker of the pipeline ``p``, without the `omniq` command around it.

It is on the CPU unless ``STAGE_DEVICE`` names another device.
"""

from __future__ import annotations

import os
import sys

from omniq_workers.main import run_worker

if __name__ == "__main__":
    run_worker("p", sys.argv[1], [os.environ.get("STAGE_DEVICE", "cpu")])
