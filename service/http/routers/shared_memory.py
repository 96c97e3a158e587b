"""The system shared memory extension of the Open Inference Protocol: a client on this host names
regions of its shared memory, for the tensors of its requests.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from service.codecs.json_values import parsed_object
from service.codecs.oip_metadata import Document
from service.codecs.oip_shared_memory import whole
from service.errors import Unprocessable
from service.http.routers.dependencies import REFUSALS, CurrentCaller, regions_of
from service.regions import Region

router = APIRouter(
    prefix="/v2/systemsharedmemory", tags=["Open Inference Protocol"], responses=REFUSALS
)
_SIZE = {"type": "integer", "minimum": 0}
_REGION: dict[str, Any] = {
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "required": ["key", "byte_size"],
                        "properties": {
                            "key": {"type": "string"},
                            "offset": _SIZE,
                            "byte_size": _SIZE,
                        },
                    },
                    "example": {"key": "/images", "offset": 0, "byte_size": 602112},
                }
            },
        }
    }
}


@router.get("/status")
@router.get("/region/{region}/status")
async def status(request: Request, caller: CurrentCaller, region: str = "") -> list[Document]:
    """List the regions that this key has registered, or one of them. Scope infer."""
    caller.require("infer")
    return [asdict(each) for each in regions_of(request).status(region)]


@router.post("/region/{region}/register", **_REGION)
async def register(region: str, request: Request, caller: CurrentCaller) -> Document:
    """Register a region: `byte_size` bytes from `offset` of the file that shm_open names `key`.
    Scope infer.
    """
    caller.require("infer")
    own = regions_of(request)
    body = parsed_object(await request.body(), "the body")
    key = body.get("key")
    if not isinstance(key, str):
        raise Unprocessable(
            f"expected `key` to be a text, got {key!r:.40}", "send the key of shm_open"
        )
    offset, byte_size = (whole(name, body.get(name, 0)) for name in ("offset", "byte_size"))
    own.register(Region(region, key, offset, byte_size))
    return {}


@router.post("/unregister")
@router.post("/region/{region}/unregister")
async def unregister(request: Request, caller: CurrentCaller, region: str = "") -> Document:
    """Unregister a region of this key, or all of them. The files stay as they are. Scope infer."""
    caller.require("infer")
    regions_of(request).unregister(region)
    return {}
