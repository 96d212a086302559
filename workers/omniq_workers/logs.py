"""The worker's last log lines, kept for whoever asks why it is not ready."""

from __future__ import annotations

import logging
from collections import deque

LINES = 40
LINE_CHARS = 500


class RecentLines(logging.Handler):
    """Keeps the last lines in memory; attach it to the root logger."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._records: deque[logging.LogRecord] = deque(maxlen=LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record; most are gone before anybody asks how they read."""
        self._records.append(record)

    def last(self) -> list[str]:
        """Oldest first."""
        lines = [
            line for record in list(self._records) for line in self.format(record).splitlines()
        ]
        return [line[:LINE_CHARS] for line in lines[-LINES:]]
