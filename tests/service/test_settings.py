"""Settings: from variables and flags, unknown ones named."""

import platform
from pathlib import Path

import pytest

from pipeline.errors import PlanError
from service.settings import GIB, MIB, Settings, is_loopback, settings_from

SETTINGS = (
    "home database_url files_url files_cache_bytes executor host port http_processes grpc grpc_port"
    " advertised_address tls_certificate tls_key allowed_hosts trusted_proxies"
    " keys_required admin_key_file configs docs allow_code sandbox shared_memory max_upload_bytes"
    " max_unpacked_bytes max_plan_bytes max_infer_bytes max_body_bytes"
    " max_bytes_in_flight min_body_bytes_per_s max_connections max_connections_per_address"
    " max_queued max_running"
    " max_stored_bytes max_upload_bytes_per_hour max_requests_per_s max_tokens_per_minute"
    " max_tokens_per_day max_streams disk_reserve_bytes"
    " job_memory_bytes job_disk_bytes job_timeout_s shutdown_s retention_days audit_days"
    " load_timeout_s versions_kept log_format log_level otel_endpoint"
)


def test_the_list_of_settings_is_this() -> None:
    """A new one edits this list."""
    assert list(Settings.model_fields) == SETTINGS.split()


def test_variables_are_yaml_and_flags_overrule_them() -> None:
    environ = {
        "CRUCIBLE_SERVICE_PORT": "9000",
        "CRUCIBLE_SERVICE_ALLOWED_HOSTS": "[a.example, b.example]",
        "PATH": "/bin",
    }
    settings = settings_from(environ, port=9001, host=None, home=Path("/h"))
    assert (settings.port, settings.host, settings.allowed_hosts) == (
        9001,
        "127.0.0.1",
        ("a.example", "b.example"),
    )
    assert settings.database == Path("/h/crucible.db")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CRUCIBLE_SERVICE_PROT", "1", "did you mean CRUCIBLE_SERVICE_PORT"),
        ("CRUCIBLE_SERVICE_PORT", "high", "port: Input should be a valid integer"),
        ("CRUCIBLE_SERVICE_PORT", "[", "not a YAML value"),
        ("CRUCIBLE_SERVICE_FILES_URL", "s3://b", "these settings: files_url needs database_url"),
        ("CRUCIBLE_SERVICE_EXECUTOR", "agent", "executor 'agent' needs database_url"),
        ("CRUCIBLE_SERVICE_EXECUTOR", "nobody", "executor: Input should be 'local', 'agent'"),
        ("CRUCIBLE_SERVICE_ADVERTISED_ADDRESS", "a b:1", "advertised_address: String should match"),
        ("CRUCIBLE_SERVICE_MAX_UPLOAD_BYTES", "0", "greater than 0"),
        ("CRUCIBLE_SERVICE_TRUSTED_PROXIES", "[proxy.example]", "expected an IP address or a netw"),
        ("CRUCIBLE_SERVICE_TRUSTED_PROXIES", "[10.0.0.1/8]", "10.0.0.1/8 has host bits set"),
        ("CRUCIBLE_SERVICE_TRUSTED_PROXIES", "['::/0']", "'::/0' trusts every address"),
        (
            "CRUCIBLE_SERVICE_MAX_BYTES_IN_FLIGHT",
            "2000000",
            "at least the largest body, 268435456, got 2000000",
        ),
        ("CRUCIBLE_SERVICE_PORT", "65535", "no port comes after 65535, give grpc_port"),
        (
            "CRUCIBLE_SERVICE_MAX_STORED_BYTES",
            "1000",
            "max_stored_bytes is below max_upload_bytes: raise it, or lower the other",
        ),
        (
            "CRUCIBLE_SERVICE_TLS_KEY",
            "key.pem",
            "expected tls_certificate and tls_key, got one of them",
        ),
    ],
)
def test_a_variable_that_does_not_fit_is_named(variable: str, value: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        settings_from({variable: value})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("host", "required", "needs"),
    [
        ("127.0.0.1", None, False),
        ("::1", None, False),
        ("localhost", None, False),
        ("0.0.0.0", None, True),
        ("10.0.0.1", None, True),
        ("0.0.0.0", False, False),
        ("127.0.0.1", True, True),
    ],
)
def test_keys_are_needed_off_loopback(host: str, required: bool | None, needs: bool) -> None:
    assert Settings(home=Path("/h"), host=host, keys_required=required).needs_keys is needs


def test_the_names_that_are_answered_to() -> None:
    settings = Settings(home=Path("/h"), host="::", allowed_hosts=("Models.Example",))
    assert settings.hosts == {"localhost", "127.0.0.1", "[::1]", "models.example"}
    assert "[fd00::1]" in Settings(home=Path("/h"), host="fd00::1").hosts
    assert is_loopback("[::1]")
    assert not is_loopback("example.org")


def test_four_of_the_largest_bodies_fit_beside_each_other() -> None:
    for largest, expected in ((10, GIB), (256 * MIB, GIB), (GIB, 4 * GIB)):
        assert Settings(home=Path("/h"), max_infer_bytes=largest).bytes_in_flight == expected
    assert Settings(home=Path("/h"), max_bytes_in_flight=GIB + 1).bytes_in_flight == GIB + 1


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"host": "10.0.0.1", "port": 80}, "10.0.0.1:80"),
        ({"host": "::1", "port": 80}, "[::1]:80"),
        ({"host": "0.0.0.0", "port": 80}, f"{platform.node()}:80"),
        ({"host": "::", "advertised_address": "a.example:81"}, "a.example:81"),
        ({"port": 0}, ""),
    ],
)
def test_a_proxy_reaches_a_server_at_its_address(settings: dict[str, object], address: str) -> None:
    assert Settings.model_validate({"home": "/h", **settings}).address == address


def test_grpc_has_the_port_after_https_or_its_own() -> None:
    for port, grpc_port, expected in (
        (8000, None, 8001),
        (9000, None, 9001),
        (0, None, 0),
        (8000, 0, 0),
        (0, 7000, 7000),
    ):
        assert Settings(home=Path("/h"), port=port, grpc_port=grpc_port).rpc_port == expected
    assert settings_from({"CRUCIBLE_SERVICE_GRPC": "off"}).grpc is False


def test_the_sandbox_is_switched_off_by_the_word() -> None:
    """YAML reads it as false."""
    assert settings_from({"CRUCIBLE_SERVICE_SANDBOX": "off"}).sandbox == "off"
    with pytest.raises(PlanError, match="'auto' or 'off'"):
        settings_from({"CRUCIBLE_SERVICE_SANDBOX": "on"})


def test_servers_that_share_a_database_keep_all_versions() -> None:
    """One of them may serve a version that another one takes for unused."""
    assert Settings(versions_kept=2).most_versions == 2
    shared = Settings(versions_kept=2, database_url="postgresql+psycopg://host/name")
    assert shared.most_versions > 10**9
