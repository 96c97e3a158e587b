"""HAProxy's runtime socket: the state of its servers, and commands that change them.

HAProxy answers commands in words. Nothing here decides by them: the state that follows a command
tells whether it worked.
"""

from __future__ import annotations

import csv
import enum
import socket
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import HostError, InternalError, PlanError
from service.routing import grpc_refusals
from service.routing.addresses import Address
from service.routing.configuration import BACKENDS, GRPC, server_options

TIMEOUT_S = 5.0
SERVER_ROW = "2"  # the column `type`: 0 frontend, 1 backend, 2 server, 3 listener


class ServerState(enum.StrEnum):
    """The first word of HAProxy's column `status`."""

    UP = "UP"
    DOWN = "DOWN"  # health checks fail
    DRAIN = "DRAIN"  # it gets no new request
    MAINT = "MAINT"  # it gets no request and no health check
    STOPPING = "NOLB"  # a health check asked for no new request


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server of one backend, from a row of `show stat`."""

    backend: str
    name: str
    address: str  # IP address and port
    state: ServerState
    active: int  # requests that the server is answering
    total: int  # requests since it was added
    check: str  # HAProxy's code for the last health check, such as L7OK; empty: none yet
    check_message: str


def parse_statuses(text: str) -> tuple[ServerStatus, ...]:
    """Read the servers in the answer to `show stat`, which is CSV with `# ` before its header.

    InternalError if a column is missing or has an unknown value.
    """
    rows = csv.DictReader(text.removeprefix("# ").strip().splitlines())
    try:
        return tuple(
            _status(row)
            for row in rows
            if row["type"] == SERVER_ROW and row["svname"] != grpc_refusals.SERVER
        )
    except (KeyError, ValueError) as error:
        raise InternalError(f"HAProxy's statistics cannot be read: {error!r}") from error


def _status(row: dict[str, str]) -> ServerStatus:
    return ServerStatus(
        backend=row["pxname"],
        name=row["svname"],
        address=row["addr"],
        state=ServerState(row["status"].partition(" ")[0]),  # `UP 1/2`, `MAINT (via http/a)`
        active=int(row["scur"]),
        total=int(row["stot"]),
        check=row["check_status"].removeprefix("* "),  # `* `: a check is under way
        check_message=row["last_chk"],
    )


class Runtime:
    """The runtime socket of one HAProxy. Every method raises HostError if nobody listens on it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, command: str) -> str:
        """Send one command and return HAProxy's answer."""
        answer = bytearray()
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(TIMEOUT_S)
                connection.connect(str(self._path))
                connection.sendall(f"{command}\n".encode("ascii"))
                while part := connection.recv(65536):
                    answer += part
        except OSError as error:
            raise HostError(
                f"no proxy answers on '{self._path}': {error.strerror or error}",
                "start one with `crucible proxy start`, or give its --home",
            ) from error
        return answer.decode(errors="replace").strip()

    def servers(self) -> tuple[ServerStatus, ...]:
        """Return the state of every server in every backend."""
        return parse_statuses(self.ask("show stat"))

    def status(self, address: Address) -> tuple[ServerStatus, ...]:
        """Return the state of a server in every backend. PlanError if the proxy does not know it,
        or knows it in some backends only.
        """
        servers = self.servers()
        found = tuple(each for each in servers if each.name == address.name)
        if len(found) < len(BACKENDS):
            known = ", ".join(sorted({each.name for each in servers})) or "none"
            raise PlanError(
                f"the proxy has no server {address}; its servers: {known}",
                "give one of them, as `crucible proxy list` prints it",
            )
        return found

    def add(self, address: Address) -> None:
        """Add a server. It gets requests after its first good health check.

        HostError if HAProxy refuses it.
        """
        ip = address.resolve()
        for backend in BACKENDS:
            port = address.port + (backend == GRPC)
            name = f"{backend}/{address.name}"
            answers = [
                self.ask(f"add server {name} {ip}:{port} {server_options(backend, address.port)}"),
                self.ask(f"enable health {name}"),
                # out of maintenance without requests, so that its health can be set
                self.ask(f"set server {name} state drain"),
                self.ask(f"set server {name} health down"),
                self.ask(f"set server {name} state ready"),
            ]
            states = [
                each.state
                for each in self.servers()
                if (each.backend, each.name) == (backend, address.name)
            ]
            if not states or states == [ServerState.MAINT]:
                raise HostError(
                    f"HAProxy does not take the server {address}: {' '.join(answers).strip()}",
                    "check the address; HAProxy 2.6 or later is needed",
                )

    def drain(self, address: Address) -> None:
        """Give a server no new request. Those that it has go on."""
        self._set(address, "drain")

    def enable(self, address: Address) -> None:
        """Give a server requests again, as soon as its health checks pass."""
        self._set(address, "ready")

    def active(self, address: Address) -> int:
        """Return how many requests a server is answering."""
        return sum(each.active for each in self.status(address))

    def remove(self, address: Address) -> bool:
        """Forget a server that answers no request. False if it still holds connections: idle ones
        end after two seconds.
        """
        for backend in BACKENDS:
            name = f"{backend}/{address.name}"
            self.ask(f"set server {name} state maint")
            self.ask(f"del server {name}")
        return all(each.name != address.name for each in self.servers())

    def _set(self, address: Address, state: str) -> None:
        self.status(address)
        for backend in BACKENDS:
            self.ask(f"set server {backend}/{address.name} state {state}")
