"""The limits of the caller, and what is used of them."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from service.http.routers.dependencies import REFUSALS, CurrentCaller, CurrentService
from service.http.schemas import LimitsView, LimitView
from service.submission.stored_bytes import stored_bytes

router = APIRouter(tags=["operations"], responses=REFUSALS)


@router.get("/limits")
async def limits(caller: CurrentCaller, service: CurrentService) -> LimitsView:
    """Return each limit of the caller's key and of its owner, and what is used now. A refusal with
    429 names the setting of the limit.
    """
    settings, key = service.settings, caller.key
    usage = await service.limits.usage(key)
    jobs = await service.read(lambda: service.jobs.counts(caller.owner))
    running = jobs.get("running", 0) + jobs.get("cancelling", 0)
    stored = await stored_bytes(service, caller.owner)
    rows: tuple[tuple[Literal["key", "owner"], str, str, int, int | None], ...] = (
        ("owner", "max_queued", "waiting jobs", jobs.get("queued", 0), settings.max_queued),
        ("owner", "max_running", "running jobs", running, settings.max_running),
        (
            "owner",
            "max_stored_bytes",
            "bytes of all jobs and drafts",
            stored,
            settings.max_stored_bytes,
        ),
        (
            "key",
            "max_upload_bytes_per_hour",
            "bytes uploaded in this hour",
            usage.uploaded_bytes,
            settings.max_upload_bytes_per_hour,
        ),
        (
            "key",
            "max_requests_per_s",
            "requests in the last second",
            usage.requests,
            settings.max_requests_per_s if key else None,  # not counted where no key is needed
        ),
        *(
            ("key", setting, meaning, usage.tokens.get(setting, 0), limit)
            for setting, meaning, limit in (
                (
                    "max_tokens_per_minute",
                    "tokens of language models in this minute",
                    settings.max_tokens_per_minute,
                ),
                (
                    "max_tokens_per_day",
                    "tokens of language models in this day",
                    settings.max_tokens_per_day,
                ),
            )
        ),
        ("key", "max_streams", "open streams", usage.streams, settings.max_streams),
    )
    return LimitsView(
        owner=caller.owner,
        key=key or None,
        limits=tuple(
            LimitView(setting=setting, meaning=meaning, per=per, used=used, limit=limit)
            for per, setting, meaning, used, limit in rows
        ),
    )
