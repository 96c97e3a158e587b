"""Server settings: one frozen value, read once from CRUCIBLE_SERVICE_* variables and the command
line.

docs/reference/settings.md is generated from the descriptions here.
"""

from __future__ import annotations

import difflib
import ipaddress
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from pipeline.core.frozen import Frozen
from pipeline.errors import PlanError
from pipeline.plan.files import home

PREFIX = "CRUCIBLE_SERVICE_"
MIB, GIB = 2**20, 2**30
EVERY_ADDRESS = ("0.0.0.0", "::", "[::]")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


# YAML reads `off` as false
SandboxChoice = Annotated[
    Literal["auto", "off"], BeforeValidator(lambda value: "off" if value is False else value)
]


def _networks(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        try:
            network = ipaddress.ip_network(text)
        except ValueError as error:
            raise ValueError(
                f"expected an IP address or a network, got '{text}': {error}"
            ) from None
        if network.prefixlen == 0:
            raise ValueError(
                f"'{text}' trusts every address, so that clients choose theirs; name the proxies"
            )
    return texts


class Settings(Frozen):
    """All settings of `crucible serve`. Sizes in bytes, times in seconds."""

    # absolute, because jobs run in other working directories
    home: Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())] = Field(
        default_factory=home,
        validate_default=True,
        description="Folder of all data. Default: `CRUCIBLE_HOME`, else the user's data folder.",
    )
    database_url: str | None = Field(
        default=None,
        repr=False,  # it may hold a password
        description=(
            "Address of a PostgreSQL database, `postgresql+psycopg://USER@HOST/NAME`. Needs the"
            " extra `postgres`. Servers that share it must share the folder `home`, or"
            " `files_url`. Default: SQLite in `home`."
        ),
    )
    files_url: str | None = Field(
        default=None,
        description=(
            "Where servers with one `database_url` keep uploads, reports and promoted versions:"
            " `s3://BUCKET/PREFIX`. Needs the extra `s3`. Each server then has a `home` of its own"
            " as a cache. Default: only in `home`."
        ),
    )
    files_cache_bytes: int = Field(
        default=100 * GIB,
        gt=0,
        description=(
            "Size of the copies of files of `files_url` in `home`. Above it, the least recently"
            " used go, except those in use."
        ),
    )
    executor: Literal["local", "agent", "ray"] = Field(
        default="local",
        description=(
            "Who runs the jobs. `local`: this server, and the nodes of its `database_url`. `agent`:"
            " only nodes, which `crucible node start` starts. `ray`: only nodes, which `crucible"
            " ray start` starts. Without a live node, `GET /readyz?for=jobs` answers 503."
        ),
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port of HTTP. 0: any free port.")
    http_processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description=(
            "Processes that read and write HTTP connections. 1: the server's own process does it."
            " More help where bodies are large and one core is the limit."
        ),
    )
    grpc: bool = Field(default=True, description="Whether to serve gRPC too.")
    grpc_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of gRPC. 0: any free port. Default: the port after `port`.",
    )
    advertised_address: str | None = Field(
        default=None,
        pattern=r"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$",
        description=(
            "`HOST:PORT` under which `crucible proxy start --from-database` reaches this server."
            " Default: `host` and `port`; the name of this machine if `host` is every address."
        ),
    )
    tls_certificate: Path | None = Field(
        default=None, description="PEM file of the certificate with its chain, for HTTP and gRPC."
    )
    tls_key: Path | None = Field(
        default=None, description="PEM file of its key, without a passphrase."
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description=(
            "Host names under which clients reach the service, besides `host` and those of"
            " loopback."
        ),
    )
    trusted_proxies: Annotated[tuple[str, ...], AfterValidator(_networks)] = Field(
        default=(),
        description=(
            "IP addresses and networks of proxies whose `X-Forwarded-For` is believed, over HTTP"
            " and gRPC: `[10.0.0.9, 10.1.0.0/16]`. The audit and the limit of failed"
            " authentications then have the client's address, and `max_connections_per_address`"
            " does not hold for the proxies."
        ),
    )
    keys_required: bool | None = Field(
        default=None, description="Whether API keys are needed. Default: unless `host` is loopback."
    )
    admin_key_file: Path | None = Field(
        default=None, description="File with the first admin key, for containers."
    )
    configs: Path | None = Field(default=None, description="Folder of plans that clients may name.")
    docs: Path | None = Field(
        default=None,
        description=(
            "Folder of the built documentation, which `/help` then shows to everybody: `build/docs`"
            " after `make docs`. It is read at the start."
        ),
    )
    allow_code: bool = Field(
        default=False,
        description=(
            "Accept .pt2, an exported program, which torch unpickles: that may run its sender's"
            " code. TorchScript and pickles are never accepted. An upload is still refused unless"
            " the sandbox stops all that such code must not do."
        ),
    )
    sandbox: SandboxChoice = Field(
        default="auto",
        description=(
            "`auto`: jobs, workers of models and decoders run in every layer of the sandbox that"
            " this host can hold. `off`: in none."
        ),
    )
    shared_memory: bool = Field(
        default=False,
        description=(
            "Clients on this host may pass tensors in files of /dev/shm that belong to the user of"
            " the server."
        ),
    )

    max_upload_bytes: int = Field(
        default=4 * GIB, gt=0, description="Size of the files of one request together."
    )
    max_unpacked_bytes: int = Field(
        default=8 * GIB, gt=0, description="Size of the files of an archive together."
    )
    max_plan_bytes: int = Field(
        default=256 * 1024, gt=0, description="Size of a plan, and of a JSON body."
    )
    max_infer_bytes: int = Field(
        default=256 * MIB,
        gt=0,
        description=(
            "Size of one inference request, both compressed and unpacked. Also of its inputs in"
            " shared memory."
        ),
    )
    max_body_bytes: int = Field(default=MIB, gt=0, description="Size of all other requests.")
    max_bytes_in_flight: int | None = Field(
        default=None,
        ge=MIB,
        description=(
            "Bytes of all unfinished requests together, at least those of the largest body."
            " Default: 1 GiB, or four of the largest bodies if that is more."
        ),
    )
    min_body_bytes_per_s: int = Field(
        default=64 * 1024, gt=0, description="Bytes per second at which a body has to arrive."
    )
    max_connections: int = Field(
        default=4096,
        gt=0,
        description="Connections of HTTP. Also connections of gRPC, and its calls.",
    )
    max_connections_per_address: int = Field(
        default=1024, gt=0, description="Connections of HTTP from one address."
    )
    max_queued: int = Field(default=1000, gt=0, description="Waiting jobs of one owner.")
    max_running: int | None = Field(
        default=None,
        gt=0,
        description="Running jobs of one owner; its other jobs wait. Default: one on each device.",
    )
    max_stored_bytes: int = Field(
        default=200 * GIB, gt=0, description="Size of all jobs of one owner."
    )
    max_upload_bytes_per_hour: int = Field(
        default=100 * GIB, gt=0, description="Bytes that one key sends to `/compile` in an hour."
    )
    max_requests_per_s: int | None = Field(
        default=None,
        gt=0,
        description=(
            "Requests of one key in a second, over HTTP and gRPC. Default: no limit, because only"
            " your models and your machine tell a good number."
        ),
    )
    max_tokens_per_minute: int | None = Field(
        default=None,
        gt=0,
        description=(
            "Tokens of language models that one key uses in a minute, prompts and answers together."
            " A request counts with its `max_tokens` until it ends. Default: no limit."
        ),
    )
    max_tokens_per_day: int | None = Field(
        default=None, gt=0, description="As `max_tokens_per_minute`, in a day."
    )
    max_streams: int = Field(
        default=100,
        gt=0,
        description="Open streams of one key: events of jobs, and `ModelStreamInfer` of gRPC.",
    )
    disk_reserve_bytes: int = Field(
        default=2 * GIB,
        ge=0,
        description=(
            "Free space of the disk below which no new job is accepted. It leaves room for the"
            " database, the logs and running jobs."
        ),
    )

    job_memory_bytes: int | None = Field(
        default=None,
        gt=0,
        description=(
            "Memory of a job and all its processes. Default: 80 % of the memory of the machine, or"
            " of the container."
        ),
    )
    job_disk_bytes: int = Field(default=50 * GIB, gt=0, description="Size of a job's work folder.")
    job_timeout_s: float = Field(
        default=6 * 3600, gt=0, description="Time of one attempt of a job."
    )
    shutdown_s: float = Field(
        default=20, gt=0, description="Time from SIGTERM until running work is stopped."
    )
    retention_days: float = Field(
        default=30,
        gt=0,
        description="How long finished jobs with their files, and unused artifacts, are kept.",
    )
    audit_days: float = Field(
        default=365, gt=0, description="How long entries of the audit are kept."
    )
    load_timeout_s: float = Field(
        default=180,
        gt=0,
        description="Time until an engine is loaded and warm; also when a worker is started again.",
    )
    versions_kept: int = Field(
        default=5,
        ge=1,
        description=(
            "How many of the newest versions of each model are kept, besides those in use. With"
            " `database_url` and without `files_url` all are, because another server may use them."
        ),
    )

    log_format: Literal["json", "text"] = Field(
        default="json", description="Format of the log's lines."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level of the log's lines."
    )
    otel_endpoint: str | None = Field(
        default=None,
        description=(
            "Address for traces, OTLP over HTTP: requests, with their job and its stages. Needs"
            " the extra `otel`. Default: no traces."
        ),
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.grpc and self.rpc_port > 65535:
            raise ValueError("no port comes after 65535, give grpc_port")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("expected tls_certificate and tls_key, got one of them")
        if self.files_url is not None and self.database_url is None:
            raise ValueError("files_url needs database_url, which says what is there")
        if self.executor != "local" and self.database_url is None:
            raise ValueError(
                f"executor '{self.executor}' needs database_url, from which nodes take jobs"
            )
        for name in ("max_stored_bytes", "max_upload_bytes_per_hour"):
            if getattr(self, name) < self.max_upload_bytes:
                raise ValueError(f"{name} is below max_upload_bytes: raise it, or lower the other")
        largest = max(self.max_infer_bytes, self.max_body_bytes)
        if self.bytes_in_flight < largest:
            raise ValueError(
                f"expected max_bytes_in_flight to be at least the largest body, {largest}, got"
                f" {self.max_bytes_in_flight}"
            )
        return self

    @property
    def needs_keys(self) -> bool:
        return self.keys_required if self.keys_required is not None else not is_loopback(self.host)

    @property
    def bytes_in_flight(self) -> int:
        """The limit of all unfinished requests together."""
        if self.max_bytes_in_flight is not None:
            return self.max_bytes_in_flight
        return max(GIB, 4 * max(self.max_infer_bytes, self.max_body_bytes))

    @property
    def rpc_port(self) -> int:
        """The port of gRPC; 0: any free port."""
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + 1 if self.port else 0

    @property
    def address(self) -> str:
        """Where a proxy reaches this server, as HOST:PORT; empty if its port is not known."""
        if self.advertised_address is not None or self.port == 0:
            return self.advertised_address or ""
        host = platform.node() if self.host in EVERY_ADDRESS else self.host.strip("[]")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def hosts(self) -> frozenset[str]:
        """All names that a Host header may have, without the port."""
        names = [*LOOPBACK_NAMES, *self.allowed_hosts]
        if self.host not in EVERY_ADDRESS:
            names.append(f"[{self.host}]" if ":" in self.host else self.host)
        return frozenset(name.lower() for name in names)

    @property
    def most_versions(self) -> int:
        """How many versions of each model are kept: all, if another server may use them."""
        return sys.maxsize if self.shares_home else self.versions_kept

    @property
    def shares_home(self) -> bool:
        """Whether other servers may use the folder `home`."""
        return self.database_url is not None and self.files_url is None

    @property
    def database(self) -> Path:
        """The file of SQLite, which `database_url` replaces."""
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
                else "docs/reference/settings.md lists the settings",
            )
        values[field] = _value(variable, environ[variable])
    values |= {name: value for name, value in options.items() if value is not None}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(map(_sentence, error.errors()))
        raise PlanError(
            f"the service cannot start with these settings: {faults}",
            "docs/reference/settings.md lists the settings",
        ) from error


def _sentence(fault: ErrorDetails) -> str:
    """Describe what is wrong; the name of the setting first, unless several are to blame."""
    name = "".join(f"{part}: " for part in fault["loc"])
    return name + fault["msg"].removeprefix("Value error, ")


def _value(variable: str, text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(
            f"{variable} is not a YAML value: {error}", "quote it, or write a list as [a, b]"
        ) from error
