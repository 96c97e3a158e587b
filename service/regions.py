"""Regions of POSIX shared memory that clients on this host register, so that requests need not
hold the bytes of their tensors.

own = regions.of(caller.key, address, headers)     Forbidden: switched off, or not from this host
own.register(Region("in", "/images", offset=0, byte_size=602112))
tensors = own.inputs({"x": SharedInput(Place("in", 602112), dtype, shape)})

A region is a name for a range of a file in /dev/shm. The file is opened and checked again for each
access, so nothing is held that a client has removed. It is never mapped: a client that shortened a
mapped file would kill the server by SIGBUS, while a read only ends early.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service.errors import Conflict, Forbidden, NotFound, TooLarge, TooMany, Unprocessable
from service.settings import GIB, Settings

Array = NDArray[np.generic]

FOLDER = Path("/dev/shm")  # where Linux keeps what shm_open creates
KEY = re.compile(r"/?(?!\.{1,2}$|sem\.)([^/\0]{1,255})")  # "sem.": semaphores of sem_open
MAX_NAME = 255
MAX_REGIONS = 1024  # of one API key
MAX_REGIONS_BYTES = 64 * GIB  # of one API key
# A proxy adds one of them, or none: then its clients look like clients on this host.
FORWARDING = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a region, as a request names it."""

    region: str
    byte_size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class SharedInput:
    """An input that a request does not hold. `place.byte_size` fits the dtype and the shape."""

    place: Place
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A range of bytes of a file in FOLDER. Accesses are Unprocessable if they fail."""

    name: str
    key: str  # of shm_open: the name of the file, with or without a slash before it
    offset: int
    byte_size: int

    def part(self, place: Place) -> Region:
        """The part of this region at a place; Unprocessable if it does not lie within."""
        if place.offset + place.byte_size > self.byte_size:
            raise Unprocessable(
                f"{place.byte_size} bytes at offset {place.offset} of region '{self.name}', which"
                f" has {self.byte_size} bytes",
                "name a place within the region, or register a larger one",
            )
        return replace(self, offset=self.offset + place.offset, byte_size=place.byte_size)

    def check(self) -> None:
        """Check that the file exists, may be used, and is long enough."""
        with self._opened(os.O_RDONLY) as descriptor:
            self._check_size(descriptor)

    def read_into(self, target: memoryview) -> None:
        """Fill `target`, which has `byte_size` bytes. One copy, by the kernel."""
        with self._opened(os.O_RDONLY) as descriptor:
            done = 0
            while done < len(target):
                count = os.preadv(descriptor, [target[done:]], self.offset + done)
                if count == 0:
                    raise self._short(self.offset + done)
                done += count

    def write(self, source: memoryview) -> None:
        """Write at most `byte_size` bytes from the start of the region. One copy, by the kernel."""
        if len(source) > self.byte_size:
            raise Unprocessable(
                f"region '{self.name}': {len(source)} bytes for a place of {self.byte_size} bytes",
                "give the output a place that holds it",
            )
        with self._opened(os.O_RDWR) as descriptor:
            self._check_size(descriptor)  # writing would make the file longer
            done = 0
            while done < len(source):
                done += os.pwrite(descriptor, source[done:], self.offset + done)

    @contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        """Open the file: a regular one, of this server's user, itself in FOLDER."""
        match = KEY.fullmatch(self.key)
        if match is None:
            raise Unprocessable(
                f"{self.key!r:.80} is no key of shared memory: expected a plain name, such as"
                " '/images'",
                "send the key of shm_open, not a path",
            )
        more_flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for a writer
        try:
            descriptor = os.open(FOLDER / match[1], flags | more_flags)
            try:
                state = os.fstat(descriptor)
                if not stat.S_ISREG(state.st_mode) or state.st_dev != FOLDER.stat().st_dev:
                    raise Unprocessable(
                        f"'{self.key}' is no regular file in {FOLDER}", "create it by shm_open"
                    )
                if state.st_uid != os.geteuid():
                    raise Unprocessable(
                        f"'{self.key}' belongs to user {state.st_uid}, expected user"
                        f" {os.geteuid()}, which runs this server",
                        "run the client as the user of the server",
                    )
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise Unprocessable(
                f"region '{self.name}': cannot use '{self.key}' in {FOLDER}: {error.strerror}",
                "create it by shm_open, and keep it while it is registered",
            ) from error

    def _check_size(self, descriptor: int) -> None:
        file_bytes = os.fstat(descriptor).st_size
        if file_bytes < self.offset + self.byte_size:
            raise self._short(file_bytes)

    def _short(self, file_bytes: int) -> Unprocessable:
        return Unprocessable(
            f"region '{self.name}': '{self.key}' has {file_bytes} bytes, expected at least"
            f" {self.offset + self.byte_size}",
            "give it its size by ftruncate, and keep it while it is registered",
        )


@dataclass(frozen=True, slots=True)
class RegionTensor:
    """A tensor that is read from its region when its batch is written."""

    region: Region
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of its values."""
        return math.prod(self.shape)

    def read(self) -> Array:
        """Read the tensor into new memory."""
        array = np.empty(self.shape, self.dtype)
        self.read_into(array)
        return array

    def read_into(self, target: Array) -> None:
        """Read the tensor into an array of its dtype and shape: at once if that is contiguous."""
        if target.flags.c_contiguous:
            self.region.read_into(target.reshape(-1).view(np.uint8).data)
        else:
            target[...] = self.read()


Inputs = Mapping[str, Array | RegionTensor]


def array_of(tensor: Array | RegionTensor) -> Array:
    """The values of a tensor: it is read if it is in a region."""
    return tensor.read() if isinstance(tensor, RegionTensor) else tensor


class OwnRegions:
    """The regions of one API key, by name."""

    def __init__(self, regions: dict[str, Region], max_infer_bytes: int) -> None:
        self._regions, self._max_infer_bytes = regions, max_infer_bytes

    def register(self, region: Region) -> None:
        """Add a region. Conflict: its name is in use; TooMany: a limit of the key is reached."""
        if not 0 < len(region.name) <= MAX_NAME or region.byte_size == 0:
            raise Unprocessable(
                f"a region of {region.byte_size} bytes with a name of {len(region.name)}"
                f" characters, expected at least one byte, and 1 to {MAX_NAME} characters",
                "send a name, and the size of the region",
            )
        if region.name in self._regions:
            raise Conflict(
                f"region '{region.name}' is registered already",
                "unregister it first, or take another name",
            )
        total_bytes = region.byte_size + sum(each.byte_size for each in self._regions.values())
        if len(self._regions) >= MAX_REGIONS or total_bytes > MAX_REGIONS_BYTES:
            raise TooMany(
                f"{len(self._regions) + 1} regions with {total_bytes} bytes, expected at most"
                f" {MAX_REGIONS} of one key, with {MAX_REGIONS_BYTES} bytes",
                "unregister those that you no longer use",
            )
        region.check()
        self._regions[region.name] = region

    def unregister(self, name: str = "") -> None:
        """Remove a region, or all without a name; NotFound. The file stays as it is."""
        if not name:
            self._regions.clear()
        else:
            del self._regions[self._find(name).name]

    def status(self, name: str = "") -> tuple[Region, ...]:
        """One region, or all without a name; NotFound."""
        return (self._find(name),) if name else tuple(self._regions.values())

    def inputs(self, inputs: Mapping[str, SharedInput]) -> dict[str, RegionTensor]:
        """Find the inputs of a request. They are checked now, and read later.

        TooLarge: they exceed the limit of a request together. It applies here, too: a file
        without content may be as long as its owner likes.
        """
        total_bytes = sum(shared.place.byte_size for shared in inputs.values())
        if total_bytes > self._max_infer_bytes:
            raise TooLarge(
                f"inputs of {total_bytes} bytes in shared memory, expected at most"
                f" {self._max_infer_bytes}",
                "send less, or ask the operator to raise the limit",
            )
        tensors = {}
        for name, shared in inputs.items():
            part = self._find(shared.place.region).part(shared.place)
            part.check()
            tensors[name] = RegionTensor(part, shared.dtype, shared.shape)
        return tensors

    def outputs(self, places: Mapping[str, Place]) -> dict[str, Region]:
        """Find the places of the outputs, before the request runs."""
        return {name: self._find(place.region).part(place) for name, place in places.items()}

    def _find(self, name: str) -> Region:
        if name not in self._regions:
            raise NotFound(
                f"this key has no region '{name[:80]}' of shared memory", "register it first"
            )
        return self._regions[name]


class Regions:
    """The regions of all API keys. They are kept in memory only."""

    def __init__(self, settings: Settings) -> None:
        self._enabled, self._max_infer_bytes = settings.shared_memory, settings.max_infer_bytes
        self._of_key: dict[str, dict[str, Region]] = {}

    def of(self, key: str, address: str, headers: Iterable[str]) -> OwnRegions:
        """The regions of one API key, by its prefix, for a request from an address.

        Forbidden: they are switched off, or the request does not come from this host. `headers`
        are the names of the request's headers, in small letters.
        """
        if not self._enabled:
            raise Forbidden(
                "shared memory is switched off on this server",
                "send the tensors in the request, or start the server with --shared-memory",
            )
        forwarding = sorted(FORWARDING.intersection(headers))
        if forwarding or not is_loopback_address(address):
            way = (
                f"through a proxy: it has '{forwarding[0]}'" if forwarding else f"from '{address}'"
            )
            raise Forbidden(
                f"shared memory is only for clients on this host, and this request came {way}",
                "connect to 127.0.0.1 or ::1, without a proxy, or send the tensors in the request",
            )
        return OwnRegions(self._of_key.setdefault(key, {}), self._max_infer_bytes)


def is_loopback_address(address: str) -> bool:
    """Return True for an IP address of this host's loopback, also in its IPv6 form."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)  # of a socket for both versions
    return (mapped or parsed).is_loopback
