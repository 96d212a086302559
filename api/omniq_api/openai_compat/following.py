"""Following a running job up to its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from omniq.jobs.model import JobEvent, JobRecord, JobState
from omniq.settings import get_settings
from omniq_api.openai_compat import answers
from omniq_api.openai_compat.faults import OpenAIError
from omniq_api.openai_compat.mapping import Submission
from omniq_api.openai_error import SERVER
from omniq_api.revocation import KeyRevoked
from omniq_api.services import Services

#: Seconds between two looks at whether the server stops, where no keep-alive is wanted.
PATIENCE = 15.0


async def followed(
    services: Services, job: JobRecord, submission: Submission
) -> AsyncGenerator[JobEvent | JobRecord | None]:
    """A job's events as they come, None when nothing has come for a while, and last its record.

    Raises:
        OpenAIError: the job failed, this server stops, or the key was revoked.
        BrokerUnavailable: the broker went away.
    """
    keep_alive = get_settings().openai_keep_alive
    events = services.events(job.id, block=keep_alive or PATIENCE)
    async with aclosing(events):
        try:
            async for event in events:
                if event is not None and event.final:
                    break
                if event is not None or keep_alive:
                    yield event
            else:
                raise OpenAIError(503, "this server stops; ask again", kind=SERVER)
        except KeyRevoked as exc:
            raise OpenAIError(401, str(exc), code="invalid_api_key") from exc
    record = await services.store.get(job.id)
    if record.state is not JobState.SUCCEEDED:
        raise answers.failure(record, submission)
    yield record
