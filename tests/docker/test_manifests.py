"""What lies in docker/ fits the service, and the schemas of those who read it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from service.app import create_app
from service.settings import Settings, settings_from
from tests.docker.test_deploy import PAGE
from tests.service.builders.metrics import metrics_text
from tests.service.integration.test_docs import HOW_TOS, commands

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
CRD = yaml.safe_load(Path(__file__).with_name("kserve_inferenceservices.yaml").read_text())
Document = dict[str, Any]


def documents(name: str) -> list[Document]:
    return list(yaml.safe_load_all((DOCKER / "k8s" / name).read_text()))


def deployment_pod() -> Document:
    (pod,) = (
        document["spec"]["template"]["spec"]
        for document in documents("deployment.yaml")
        if document["kind"] == "Deployment"
    )
    return dict(pod)


def predictor_pod() -> Document:
    return dict(documents("inferenceservice.yaml")[0]["spec"]["predictor"])


PODS = pytest.mark.parametrize(
    "pod", [deployment_pod(), predictor_pod()], ids=["Deployment", "InferenceService"]
)


def environment(pod: Document) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}


def settings_of(variables: dict[str, str]) -> Settings:
    """As in the image: bound to all addresses."""
    return settings_from({"CRUCIBLE_SERVICE_HOST": "0.0.0.0", **variables})


# -- Kubernetes --------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_kubernetes_takes_the_deployment(version: str) -> None:
    kinds = [
        kubernetes_validate.validate(document, version, strict=True) and document["kind"]
        for document in documents("deployment.yaml")
    ]
    assert kinds == ["PersistentVolumeClaim", "Deployment", "Service"]


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_kubernetes_takes_the_job(version: str) -> None:
    (document,) = documents("job.yaml")
    kubernetes_validate.validate(document, version, strict=True)
    assert document["kind"] == "Job"
    document["spec"]["backOffLimit"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="backOffLimit"):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_job_compiles_once_with_the_rights_of_the_service() -> None:
    (document,) = documents("job.yaml")
    pod, served = document["spec"]["template"]["spec"], deployment_pod()
    (container,), (server,) = pod["containers"], served["containers"]
    assert pod["securityContext"] == served["securityContext"]
    assert container["securityContext"] == server["securityContext"]
    assert (container["image"], pod["restartPolicy"]) == (server["image"], "Never")
    command, plan, option, out = container["args"]
    assert (command, option) == ("compile", "--out")
    (work,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "work"]
    assert all(
        Path(path).is_relative_to(work) for path in (plan, out, environment(pod)["CRUCIBLE_HOME"])
    )
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]


def test_a_misspelt_field_would_be_found() -> None:
    _, deployment, _ = documents("deployment.yaml")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 40
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(deployment, "1.34", strict=True)


def closed(schema: Any) -> Any:
    """A schema that refuses unknown fields, which KServe would drop without a word."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    members = {name: closed(item) for name, item in schema.items()}
    return (
        {"additionalProperties": False, **members}
        if isinstance(members.get("properties"), dict) and members.get("type") == "object"
        else members
    )


def test_kserve_takes_the_inference_service() -> None:
    (document,) = documents("inferenceservice.yaml")
    (version,) = CRD["spec"]["versions"]
    assert document["apiVersion"] == f"{CRD['spec']['group']}/{version['name']}"
    assert document["kind"] == CRD["spec"]["names"]["kind"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(document["spec"], schema["properties"]["spec"])
    document["spec"]["predictor"]["containers"][0]["volumeMount"] = []
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        jsonschema.validate(document["spec"], schema["properties"]["spec"])


@PODS
def test_a_pod_is_stopped_after_the_drain(pod: Document) -> None:
    assert pod["terminationGracePeriodSeconds"] > settings_of(environment(pod)).shutdown_s


@PODS
def test_probes_ask_paths_that_are_there_by_a_name_that_is_answered(
    pod: Document, tmp_path: Path
) -> None:
    container = pod["containers"][0]
    probes = {
        kind: container[kind]["httpGet"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startupProbe": "/healthz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    paths = create_app(Settings(home=tmp_path)).openapi()["paths"]
    for probe in probes.values():
        assert probe["path"] in paths
        assert [
            header["value"] in settings_of(environment(pod)).hosts
            for header in probe["httpHeaders"]
        ] == [True]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": Settings().port, "grpc": Settings().rpc_port}
    assert {
        probe["port"] if isinstance(probe["port"], int) else ports[probe["port"]]
        for probe in probes.values()
    } == {Settings().port}


def test_both_ports_are_reached_everywhere() -> None:
    (service,) = (
        each["spec"] for each in documents("deployment.yaml") if each["kind"] == "Service"
    )
    assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [
        (Settings().port, "http"),
        (Settings().rpc_port, "grpc"),
    ]
    both = [Settings().port, Settings().rpc_port]
    for name in ("Dockerfile.cpu", "Dockerfile.gpu"):
        assert f"\nEXPOSE {both[0]} {both[1]}\n" in (DOCKER / name).read_text()
    assert compose()["services"]["crucible"]["ports"] == [
        f"127.0.0.1:{port}:{port}" for port in both
    ]
    runs = [line for line in commands(HOW_TOS["containers"]) if line.startswith("docker run -d ")]
    assert len(runs) == 2
    assert all(f" -p 127.0.0.1:{both[0]}-{both[1]}:{both[0]}-{both[1]} " in line for line in runs)


@PODS
def test_a_pod_has_no_more_rights_than_it_needs(pod: Document) -> None:
    container, user = (
        pod["containers"][0],
        re.search(r"^USER (\d+):(\d+)$", (DOCKER / "Dockerfile.gpu").read_text(), re.MULTILINE),
    )
    assert user is not None
    context = pod["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (
        True,
        int(user[1]),
        int(user[2]),
    )
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False


@PODS
def test_kubernetes_own_variables_do_not_become_settings(pod: Document) -> None:
    """For a Service named `crucible` it would set CRUCIBLE_SERVICE_HOST and
    CRUCIBLE_SERVICE_PORT_HTTP.
    """
    assert pod["enableServiceLinks"] is False


@PODS
def test_a_pod_has_a_gpu_memory_to_share_and_its_home(pod: Document) -> None:
    container = pod["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in mounted["/var/lib/crucible"]
    key = environment(pod)["CRUCIBLE_SERVICE_ADMIN_KEY_FILE"]
    assert "secret" in mounted[str(Path(key).parent)]


# -- Compose -----------------------------------------------------------------


def compose() -> Document:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text()))


def test_compose_names_files_and_targets_that_are_there() -> None:
    services = compose()["services"]
    build = services["crucible"]["build"]
    dockerfile = DOCKER / build["context"] / build["dockerfile"]
    assert f" AS {build['target']}\n" in dockerfile.read_text()
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (
                (DOCKER / source).is_file()
                if source.startswith(".")
                else source in compose()["volumes"]
            ), volume
        assert set(service.get("secrets", ())) <= set(compose()["secrets"])
        assert set(service.get("depends_on", ())) <= set(services)
    assert [name for name, service in services.items() if "profiles" not in service] == ["crucible"]


def test_compose_runs_the_same_service_on_gpus() -> None:
    both = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())["services"]["crucible"]
    plain = compose()["services"]["crucible"]
    file = (ROOT / both["build"]["dockerfile"]).read_text()
    assert f" AS {plain['build']['target']}\n" in file  # the target of compose.yaml holds here too
    (device,) = both["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert both["image"] != plain["image"]


def test_keys_are_read_where_they_are_made_and_stay_out_of_git() -> None:
    page, ignored = PAGE, (ROOT / ".gitignore").read_text().splitlines()
    for secret in compose()["secrets"].values():
        assert f" > {(DOCKER / secret['file']).resolve().relative_to(ROOT)}\n" in page
    assert {"/keys/", "*.key", "auth", "*.auth"} <= {*ignored}
    written = re.findall(r"> ((?:keys/)?[\w.]*(?:key|auth))\b", page)
    assert {"keys/admin.key", "auth", "metrics.auth"} <= {*written}
    assert [name for name in written if not re.match(r"keys/|(\w+\.)?auth$", name)] == []


def test_compose_gives_settings_that_the_service_takes_and_time_to_drain() -> None:
    service = compose()["services"]["crucible"]
    settings = settings_of(service["environment"])
    assert int(service["stop_grace_period"].removesuffix("s")) > settings.shutdown_s
    assert str(settings.admin_key_file) == f"/run/secrets/{service['secrets'][0]}"
    (scrape,) = yaml.safe_load((DOCKER / "monitoring" / "prometheus.yaml").read_text())[
        "scrape_configs"
    ]
    host, _, port = scrape["static_configs"][0]["targets"][0].partition(":")
    assert host in settings.hosts
    assert int(port) == settings.port
    assert (
        scrape["authorization"]["credentials_file"]
        == f"/run/secrets/{compose()['services']['prometheus']['secrets'][0]}"
    )


def test_both_images_run_alike() -> None:
    def runs(name: str) -> list[str]:
        text = (DOCKER / name).read_text()
        return [
            line
            for line in text.splitlines()
            if re.match(
                r"(WORKDIR /var|USER|VOLUME|EXPOSE|HEALTHCHECK|ENTRYPOINT|CMD| +CMD|    CRUCIBLE|  "
                r"  HOME)",
                line,
            )
        ]

    cpu, gpu = (
        runs("Dockerfile.cpu"),
        [line for line in runs("Dockerfile.gpu") if not line.startswith("    NVIDIA")],
    )
    assert [line.rstrip(" \\") for line in gpu] == [line.rstrip(" \\") for line in cpu]
    assert len(cpu) == 12


# -- Prometheus and Grafana --------------------------------------------------


def queries() -> Iterator[str]:
    dashboard = json.loads((DOCKER / "monitoring" / "dashboard.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    for group in yaml.safe_load((DOCKER / "monitoring" / "alerts.yaml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def labels_by_name() -> dict[str, set[str]]:
    """The labels of each metric, without those of a histogram's buckets."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): {
            label for sample in family.samples for label in sample.labels
        }
        - {"le"}
        for family in text_string_to_metric_families(metrics_text())
    }


def test_every_query_asks_for_metrics_and_labels_that_there_are() -> None:
    kinds = dict(re.findall(r"^# TYPE (crucible_\w+) (\w+)$", metrics_text(), re.MULTILINE))
    known = labels_by_name()
    metrics = set()
    for query in queries():
        names = {
            re.sub(r"_(bucket|sum|count)$", "", name): name
            for name in re.findall(r"\bcrucible_\w+", query)
        } or {"up": "up"}
        labels = {"le", "job"}
        for base, name in names.items():
            if base != "up":
                assert base in known, f"{name} in {query}"
                assert (name != base) == (kinds.get(base) == "histogram"), f"{name} in {query}"
                labels |= known[base]
        inside = [
            part
            for group in re.findall(r"\{([^}]*)\}", query)
            for part in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", group)
        ]
        grouped = [
            part.strip()
            for group in re.findall(r"by \(([^)]*)\)", query)
            for part in group.split(",")
        ]
        assert {*inside, *grouped} <= labels, query
        metrics |= set(names)
    assert {
        "crucible_jobs",
        "crucible_http_request_seconds",
        "crucible_device_memory_used_bytes",
    } <= metrics
    assert {
        name
        for name in kinds
        if re.match(r"crucible_(inference|model|grpc)_", name) and not name.endswith("_created")
    } <= metrics


def test_the_dashboard_reads_from_the_source_that_is_given() -> None:
    dashboard = json.loads((DOCKER / "monitoring" / "dashboard.json").read_text())
    (source,) = yaml.safe_load((DOCKER / "monitoring" / "datasource.yaml").read_text())[
        "datasources"
    ]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    prometheus = yaml.safe_load((DOCKER / "monitoring" / "prometheus.yaml").read_text())
    assert prometheus["rule_files"] == ["alerts.yaml"]
    mounted = compose()["services"]["prometheus"]["volumes"]
    assert "./monitoring/alerts.yaml:/etc/prometheus/alerts.yaml:ro" in mounted
