"""Chunk streams: ordered, bounded streams of small items between two running stages of a job.

A stream is a Redis stream whose entry ids are ``<fence of the writing run>-<sequence>``: ordering,
resuming behind a given chunk, and refusing what an outdated run writes are Redis's own. See
``docs/streams.md``.
"""

from omniq.streams.entries import Entry, Kind
from omniq.streams.reader import ChunkReader
from omniq.streams.store import ChunkStreams, Refused, StreamBroken, Unread, UpstreamLost
from omniq.streams.writer import ChunkWriter, Follower

__all__ = [
    "ChunkReader",
    "ChunkStreams",
    "ChunkWriter",
    "Entry",
    "Follower",
    "Kind",
    "Refused",
    "StreamBroken",
    "Unread",
    "UpstreamLost",
]
