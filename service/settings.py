"""Server settings: one frozen value, read once from CRUCIBLE_SERVICE_* variables and the command
line.

docs/service.md lists every setting.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from pipeline.core import Frozen
from pipeline.errors import PlanError
from pipeline.plan.schema import home

PREFIX = "CRUCIBLE_SERVICE_"
MIB, GIB = 2**20, 2**30
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Settings(Frozen):
    """All settings of `crucible serve`. Sizes in bytes, times in seconds."""

    # absolute, because jobs run in other working directories
    home: Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())] = Field(
        default_factory=home, validate_default=True
    )
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free port
    grpc: bool = True
    # None: the port after `port`; 0: any free port
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    tls_certificate: Path | None = None  # PEM, with its chain; for HTTP and gRPC
    tls_key: Path | None = None
    # host names of the service, besides `host` and the names of loopback
    allowed_hosts: tuple[str, ...] = ()
    keys_required: bool | None = None  # None: unless bound to loopback
    admin_key_file: Path | None = None  # holds the first admin key, for containers
    configs: Path | None = None  # folder of plans that clients may name
    # accept .pt2, which runs code of its sender; TorchScript and pickle are never accepted
    allow_code: bool = False

    max_upload_bytes: int = Field(default=4 * GIB, gt=0)  # of one request's files together
    max_unpacked_bytes: int = Field(default=8 * GIB, gt=0)  # of an archive's members together
    max_plan_bytes: int = Field(default=256 * 1024, gt=0)
    # of one inference request, both compressed and unpacked
    max_infer_bytes: int = Field(default=256 * MIB, gt=0)
    max_body_bytes: int = Field(default=MIB, gt=0)  # of all other requests
    max_queued: int = Field(default=1000, gt=0)  # waiting jobs of one owner

    # of a job and all its processes; None: 80 % of the machine's
    job_memory_bytes: int | None = Field(default=None, gt=0)
    job_disk_bytes: int = Field(default=50 * GIB, gt=0)  # of a job's work directory
    job_timeout_s: float = Field(default=6 * 3600, gt=0)
    shutdown_s: float = Field(default=20, gt=0)  # from SIGTERM to the forced end
    retention_days: float = Field(default=30, gt=0)  # of finished jobs with their files
    # to load an engine and run it once
    load_timeout_s: float = Field(default=180, gt=0)
    versions_kept: int = Field(default=5, ge=1)  # of each model, besides those in use

    log_format: Literal["json", "text"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otel_endpoint: str | None = None  # OTLP over HTTP; None: no traces

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.grpc and self.rpc_port > 65535:
            raise ValueError("no port comes after 65535, give grpc_port")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("expected tls_certificate and tls_key, got one of them")
        return self

    @property
    def needs_keys(self) -> bool:
        return self.keys_required if self.keys_required is not None else not is_loopback(self.host)

    @property
    def rpc_port(self) -> int:
        """The port of gRPC; 0: any free port."""
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + 1 if self.port else 0

    @property
    def hosts(self) -> frozenset[str]:
        """All names that a Host header may have, without the port."""
        names = [*LOOPBACK_NAMES, *self.allowed_hosts]
        if self.host not in ("0.0.0.0", "::"):
            names.append(f"[{self.host}]" if ":" in self.host else self.host)
        return frozenset(name.lower() for name in names)

    @property
    def database(self) -> Path:
        return self.home / "crucible.db"


@cache  # every request calls it
def is_loopback(host: str) -> bool:
    """Return True if a server that is bound to `host` is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def settings_from(environ: Mapping[str, str], **options: object) -> Settings:
    """Read the settings from CRUCIBLE_SERVICE_* variables (their values are YAML). Options that are
    not None override them.

    PlanError names an unknown variable, with the nearest name, or one with an invalid value.
    """
    known = Settings.model_fields
    values: dict[str, Any] = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        field = variable.removeprefix(PREFIX).lower()
        if field not in known:
            suggestions = difflib.get_close_matches(field, known, n=1)
            raise PlanError(
                f"no setting {variable}",
                f"did you mean {PREFIX}{suggestions[0].upper()}?"
                if suggestions
                else "docs/service.md lists the settings",
            )
        values[field] = _value(variable, environ[variable])
    values |= {name: value for name, value in options.items() if value is not None}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
        )
        raise PlanError(
            f"the service cannot start with these settings: {faults}",
            "docs/service.md lists the settings",
        ) from error


def _value(variable: str, text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(
            f"{variable} is not a YAML value: {error}", "quote it, or write a list as [a, b]"
        ) from error
