"""The worker process: one resident engine, many tasks in flight, settled by Celery's own code."""
