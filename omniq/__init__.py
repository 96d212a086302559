"""omniq: durable, distributed serving of omni-modality models on Celery."""

from __future__ import annotations

__version__ = "0.1.0"
