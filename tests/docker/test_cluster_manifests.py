"""The manifests of several servers, of nodes and of a Ray cluster fit the commands, each other, and
the schemas of Kubernetes and KubeRay.
"""

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer.main
import yaml

from service.cli import node, ray
from service.cli.ray import selector_from
from service.cluster.scaling import devices_of
from tests.docker.test_manifests import (
    Document,
    closed,
    deployment_pod,
    documents,
    environment,
    settings_of,
)

CRD = yaml.safe_load(Path(__file__).with_name("kuberay_rayclusters.yaml").read_text())
VERSIONS = pytest.mark.parametrize("version", ["1.29", "1.34"])
RIGHTS = deployment_pod()["securityContext"]


def pod_of(name: str) -> Document:
    return dict(documents(name)[0]["spec"]["template"]["spec"])


def ray_cluster() -> Document:
    (document,) = documents("raycluster.yaml")
    return document


def ray_pods() -> dict[str, Document]:
    """The pods of the Ray cluster, by the name of their first container."""
    spec = ray_cluster()["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    pods = [dict(group["template"]["spec"]) for group in groups]
    return {pod["containers"][0]["name"]: pod for pod in pods}


def parsed(app: typer.Typer, arguments: list[str]) -> dict[str, Any]:
    """The options of a command, which is not run."""
    name, *options = arguments
    group: Any = typer.main.get_command(app)
    return dict(group.commands[name].make_context(name, options).params)


@VERSIONS
def test_kubernetes_takes_servers_and_nodes(version: str) -> None:
    found = [*documents("servers.yaml"), *documents("nodes.yaml")]
    for document in found:
        kubernetes_validate.validate(document, version, strict=True)
    assert [document["kind"] for document in found] == ["Deployment", "Service", "Deployment"]


@VERSIONS
def test_kubernetes_takes_the_pods_of_the_ray_cluster(version: str) -> None:
    for name, pod in ray_pods().items():
        document: Document = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": pod,
        }
        kubernetes_validate.validate(document, version, strict=True)
    document["spec"]["nodeSelectors"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="nodeSelectors"):
        kubernetes_validate.validate(document, version, strict=True)


def test_kuberay_takes_the_ray_cluster() -> None:
    document, (version,) = ray_cluster(), CRD["spec"]["versions"]
    assert document["apiVersion"] == f"{CRD['spec']['group']}/{version['name']}"
    assert document["kind"] == CRD["spec"]["names"]["kind"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(document["spec"], schema["properties"]["spec"])
    document["spec"]["workerGroupSpecs"][0]["maxReplica"] = 8
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        jsonschema.validate(document["spec"], schema["properties"]["spec"])


def test_the_supervisor_starts_nodes_on_the_workers() -> None:
    spec, pods = ray_cluster()["spec"], ray_pods()
    _, supervisor = pods["ray-head"]["containers"]
    command, *arguments = supervisor["args"]
    options = parsed(ray.app, arguments)
    (group,) = spec["workerGroupSpecs"]
    (worker,) = pods["ray-worker"]["containers"]
    assert command == "ray"
    assert selector_from(options["select"]) == group["labels"]
    assert options["max_nodes"] == group["maxReplicas"]
    gpus = float(worker["resources"]["limits"]["nvidia.com/gpu"])
    resources = {name: float(value) for name, value in group["resources"].items()}
    assert devices_of({"GPU": gpus, **resources}) == ("gpu:0",)
    assert worker["envFrom"] == supervisor["envFrom"], "one database"
    shared = {"ray-logs": "/tmp/ray", "shm": "/dev/shm"}
    for container in pods["ray-head"]["containers"]:
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts == shared, "a driver meets its raylet there"


def test_servers_and_nodes_share_database_and_files_and_have_homes_of_their_own() -> None:
    pods = [pod_of("servers.yaml"), pod_of("nodes.yaml"), ray_pods()["ray-worker"]]
    for pod in pods:
        (container,) = pod["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "crucible-shared"}}]
        homes = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert homes["home"] == "/var/lib/crucible"
        (home,) = [volume for volume in pod["volumes"] if volume["name"] == "home"]
        assert "emptyDir" in home
        assert pod["terminationGracePeriodSeconds"] > settings_of(environment(pod)).shutdown_s


def test_a_node_gets_the_gpu_that_it_takes() -> None:
    (container,) = pod_of("nodes.yaml")["containers"]
    command, *arguments = container["args"]
    assert (command, parsed(node.app, arguments)["devices"]) == ("node", "gpu:0")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_servers_answer_as_the_single_one_does() -> None:
    (server,), (single,) = pod_of("servers.yaml")["containers"], deployment_pod()["containers"]
    for key in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "securityContext"):
        assert server[key] == single[key], key


def test_no_pod_has_more_rights_than_it_needs() -> None:
    for pod in (pod_of("servers.yaml"), pod_of("nodes.yaml"), *ray_pods().values()):
        assert pod["securityContext"] == RIGHTS
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
