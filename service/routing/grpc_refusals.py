"""What clients of gRPC get while no server is ready: the status UNAVAILABLE, with a sentence and a
retry hint.

HAProxy's own answers come before a large message has been sent, and the reset that follows them
makes clients forget the status. So a backup server answers, which is a frontend of the same
process: it reads the message to its end first. A stream may have no end before its first answer:
it gets 503 of HTTP at once, which clients take for UNAVAILABLE.
"""

from __future__ import annotations

from pathlib import Path

from service.errors import Answer
from service.grpc.descriptors import SERVICE
from service.grpc.statuses import details_of, metadata_of, status_of

SERVER = "refusals"
"""The name of the backup server, which is none of the proxy's servers."""

STREAM = f"/{SERVICE.full_name}/ModelStreamInfer"
PIECE_BYTES = 65536


def program_path(folder: Path) -> Path:
    """Return the file of the Lua program that answers, in the folder of a proxy."""
    return folder / "refusals.lua"


def program(answer: Answer) -> str:
    """Return the Lua program that answers every call with this refusal."""
    headers = {
        "content-type": "application/grpc",
        "content-length": "0",
        "grpc-status": str(status_of(answer).value[0]),
        "grpc-message": details_of(answer),
        **dict(metadata_of(answer)),
    }
    added = "\n".join(
        f'  applet:add_header("{name}", "{value}")' for name, value in headers.items()
    )
    return f"""\
local function drain(applet)
  repeat
    local piece = applet:receive({PIECE_BYTES})
  until piece == nil or #piece == 0
end

core.register_service("{SERVER}", "http", function(applet)
  if applet.path == "{STREAM}" then
    applet:set_status(503)
    applet:start_response()
    drain(applet)
    return
  end
  drain(applet)
  applet:set_status(200)
{added}
  applet:start_response()
end)
"""


def server_line(folder: Path) -> str:
    """Return the line of a backend that makes the refusals its backup server."""
    return f'    server {SERVER} "{_socket(folder)}" backup proto h2\n'


def frontend(folder: Path) -> str:
    """Return the frontend that answers as this backup server."""
    return f"""\
frontend {SERVER}
    bind "{_socket(folder)}" mode 600 proto h2
    http-request use-service lua.{SERVER}
"""


def _socket(folder: Path) -> str:
    return f"unix@{folder / 'refusals.sock'}"
