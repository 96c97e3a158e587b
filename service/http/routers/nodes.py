"""The servers and nodes that run jobs."""

from __future__ import annotations

from fastapi import APIRouter

from service.http.routers.dependencies import REFUSALS, CurrentCaller, CurrentService
from service.http.schemas import NodePage, NodeView

router = APIRouter(tags=["operations"], responses=REFUSALS)


@router.get("/nodes")
async def list_nodes(caller: CurrentCaller, service: CurrentService) -> NodePage:
    """List the servers and nodes that run jobs, and those that have gone in the last hour."""
    caller.require("admin")
    service.host()  # raises Unavailable until this server is one of them
    nodes = await service.runner.nodes()
    return NodePage(
        nodes=tuple(
            NodeView(
                id=node.id,
                name=node.name,
                kind=node.kind,
                version=node.version,
                address=node.address,
                live=node.is_live,
                silent_s=round(max(0.0, node.silent_s), 1),
                labels={device: dict(labels) for device, labels in node.labels.items()},
                jobs=tuple(job.id for job in node.jobs),
            )
            for node in nodes
        )
    )
