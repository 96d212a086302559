"""``omniq worker``: one process, one stage, its model resident."""

from __future__ import annotations

import os
import socket
import warnings
from typing import NoReturn

from celery.exceptions import SecurityWarning

from omniq import keys
from omniq.celery import app
from omniq.config import get_pipeline
from omniq.errors import ConfigError
from omniq.settings import get_settings
from omniq_workers.devices import check_devices, pin


def run_worker(
    pipeline: str, stage: str, devices: list[str] | None = None, name: str | None = None
) -> NoReturn:
    """Serve one stage until told to stop, then end the process.

    Pins the devices, loads and warms up the engine, reports ready (log line and Celery event
    ``stage-ready``, registry), and only then takes tasks. SIGTERM and SIGINT drain for
    ``drain_seconds``, give back the rest and end with 0; a second signal ends at once. A model that
    cannot be loaded, or an engine that dies, ends with 1.

    Args:
        devices: ``["0"]``, ``["0", "1"]``, ``["cpu"]``; None: as the stage is configured.
        name: worker name; default: pipeline, stage and process id. Must differ between workers.

    Raises:
        UnknownPipeline: no such pipeline.
        ConfigError: no such stage, or no such device.
    """
    config = get_pipeline(pipeline)
    try:
        stage_config = config.stage(stage)
    except KeyError:
        known = ", ".join(s.stage_id for s in config.stages)
        raise ConfigError(f"pipeline {pipeline} has no stage {stage!r}; it has: {known}") from None
    pinned, device = pin(check_devices(devices if devices is not None else stage_config.devices))
    # Only now: these may import what looks at the devices.
    from omniq_workers.logs import RecentLines  # noqa: PLC0415
    from omniq_workers.service import StageService  # noqa: PLC0415
    from omniq_workers.worker import end_process  # noqa: PLC0415

    node = f"{name or f'{pipeline}.{stage}.{os.getpid()}'}@{socket.gethostname()}"
    # Celery warns root of pickled messages; JSON is all that is accepted here.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app.follow_settings()
    app.service = StageService(
        app,
        config,
        stage_config,
        worker_id=node,
        devices=pinned,
        device=device,
        lines=RecentLines(),
    )
    worker = app.Worker(
        hostname=node,
        queues=[keys.stage_queue(pipeline, stage), keys.control_queue()],
        loglevel=get_settings().log_level,
        quiet=True,
    )
    worker.start()
    end_process(int(worker.exitcode or 0))
