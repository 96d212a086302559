"""A stock Celery application whose worker takes messages for omniq's stages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import Celery

app = Celery("stock", broker=os.environ["OMNIQ_BROKER_URL"], set_as_current=False)
app.conf.update(
    broker_transport_options={
        "priority_steps": list(range(10)),
        "queue_order_strategy": "priority",
    },
    broker_connection_retry_on_startup=True,
)


@app.task(name="omniq.stage", bind=True, ignore_result=True)
def stage(self: Any, upstream: Any = None, *, job: str, stage: str, prompt: str = "") -> str:
    with Path(os.environ["POOL_NOTES"]).open("a") as file:
        file.write(f"0 0 {stage} {job} {upstream} {self.request.delivery_info['priority']}\n")
    return f"did {stage}"
