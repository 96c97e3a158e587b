"""Addresses of servers behind the proxy, from the command line or a file."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pipeline.errors import HostError, PlanError

ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a server listens for HTTP. Its gRPC port is the one after it, as by default."""

    host: str  # a name, or an IP address; IPv6 without brackets
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `HOST:PORT`. PlanError if it is none."""
        match = ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 65535:
            raise PlanError(
                f"expected the address of a server as HOST:PORT, got '{text}'",
                "give the host and the port of HTTP; the port of gRPC is the one after it",
            )
        return cls(match["host"].strip("[]").lower(), int(match["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def name(self) -> str:
        """The name of this server in HAProxy, which allows no brackets."""
        return f"{self.host}:{self.port}"

    def resolve(self) -> str:
        """Return the IP address of the host: HAProxy takes no names while it runs. HostError if
        there is none.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise HostError(
                f"the name of the server {self} has no address: {error}",
                "check the name, or give an IP address",
            ) from error
        return str(found[0][4][0])


def addresses_from(lines: Iterable[str]) -> tuple[Address, ...]:
    """Read one address from each line; `#` begins a comment. PlanError names a bad or a repeated
    one.
    """
    texts = [line.partition("#")[0].strip() for line in lines]
    addresses = tuple(Address.parse(text) for text in texts if text)
    for index, address in enumerate(addresses):
        if address in addresses[:index]:
            raise PlanError(f"the server {address} is given twice", "give each server once")
    return addresses


def addresses_from_file(file: Path) -> tuple[Address, ...]:
    """Read a file of addresses. PlanError if it cannot be read, or names no server."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the file of servers '{file}' cannot be read: {error}",
            "give a text file with one HOST:PORT on each line",
        ) from error
    addresses = addresses_from(lines)
    if not addresses:
        raise PlanError(
            f"the file of servers '{file}' names no server", "write one HOST:PORT on each line"
        )
    return addresses
