"""Plans and paths that name files, code or hosts of the server."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

from tests.attack.expect import counted, expect, refused, refused_upload, statuses_in
from tests.attack.targets import MODEL, Targets

DEEP = 10**5


def host_paths(targets: Targets) -> str:
    """Write paths of the server into every key of a plan that takes a path."""
    return _refuse_plans(
        targets,
        "model: {path: /etc/passwd}",
        "model: {weights: /etc/passwd, entrypoint: 'm:f'}",
        "data: {calibration: [/etc/passwd]}",
        "data: {selection: [../../crucible.db]}",
        "data: {validation: [/etc/passwd]}",
        "tensorrt: {timing_cache: /etc/passwd}",
        "tensorrt: {plugins: [/lib/libc.so.6]}",
        "name: ../../evil",
        "name: /etc/evil",
    )


def code_hooks(targets: Targets) -> str:
    """Name functions of Python in every key of a plan that takes one."""
    return _refuse_plans(
        targets,
        "model: {entrypoint: 'os:system'}",
        "model: {entrypoint: 'os:system', python_path: /tmp}",
        "accuracy: {metric: 'os:system'}",
        "simplify: {surgery: 'os:system'}",
        "architecture: 'os:system'",
        "architecture: ../resnet18",
        "preprocess: {x: {module: os}}",
    )


def yaml_plans(targets: Targets) -> str:
    """Send YAML that builds objects, expands, or is endless."""
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    mark = targets.folder / "mark"
    how = _refuse_plans(
        targets,
        f"!!python/object/apply:os.system ['touch {mark}']",
        f"name: !!python/object/apply:pathlib.Path.touch [{mark}]",
        "\n".join(["a0: &a0 [1, 1]", *levels]),
        "name: " + "[" * DEEP,
        "name: [" + "1, " * DEEP + "]",
        "{" * DEEP,
        "name: " + "9" * 10**5,
        "name: 2026-99-99",
        "name: !!bool x",
        "a: " + "x" * 10**6,
    )
    expect(not mark.exists(), "the code ran")
    return how


def addresses(targets: Targets) -> str:
    """Write addresses where a plan or a body takes names; nobody may call them."""
    with socket.create_server(("127.0.0.1", 0)) as listener, targets.server.client() as client:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        how = _refuse_plans(
            targets,
            f"model: {{path: '{url}'}}",
            f"data: {{calibration: ['{url}']}}",
            f"architecture: '{url}'",
            f"accuracy: {{metric: '{url}'}}",
        )
        answers = [
            refused(path, client.post(path, json=body), 403, 404, 422)
            for path, body in (
                ("/compile", {"config": url}),
                ("/compile", {"config": "../../../etc/passwd"}),
                ("/models/x/promote", {"report": url}),
                ("/v2/repository/models/x/load", {"parameters": {"config": url}}),
            )
        ]
        listener.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            listener.accept()
            expect(False, "the server called the address")
    return f"{how}; {counted(answers)}; nobody called"


def url_paths(targets: Targets) -> str:
    """Ask for paths that lead out: `..`, absolute, encoded, NUL, Unicode, 10 KB."""
    names = (
        "../../../etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/etc/passwd",
        "%2fetc%2fpasswd",
        "..%5c..%5cetc",
        "%00",
        "passwd%00.onnx",
        "%c0%ae%c0%ae%2f",
        "%ff%fe",
        "%E2%80%AE",
        "%F0%9F%92%A9",
        ".",
        "..",
        "x" * 10_000,
    )
    places = (
        "/models/{}",
        "/models/{}/shapes",
        "/jobs/{}",
        "/jobs/{}/log",
        "/reports/{}",
        "/reports/{}/engine.tar",
        "/v2/models/{}",
        "/v2/models/{}/versions/{}",
        "/{}",
    )
    answers = []
    for place in places:
        for name in names:
            path = place.replace("{}", name)
            data = targets.server.answer_to(targets.server.head(f"GET {path}", Connection="close"))
            (status, *more) = statuses_in(data) or [0]
            expect(400 <= status < 500 and not more, f"GET {path[:60]}: {status}")
            expect(b"root:" not in data, f"GET {path[:60]} shows a file")
            answers.append(str(status))
    return counted(answers)


def model_names(targets: Targets) -> str:
    """Promote, deploy and infer under names that lead out of the folder of models."""
    names = ("..%2fevil", "%2fetc%2fevil", "..", ".evil", "evil%00", "é", "e" * 300)
    answers = []
    for name in names:
        for method, path, body in (
            ("POST", f"/models/{name}/promote", {"report": targets.victims_job}),
            ("PUT", f"/models/{name}/deployment", {}),
            ("POST", f"/models/{name}/infer", {"inputs": {}}),
            ("POST", f"/v2/repository/models/{name}/load", {}),
        ):
            content = json.dumps(body).encode()
            head = targets.server.head(
                f"{method} {path}",
                "victim",
                Connection="close",
                Content_Type="application/json",
                Content_Length=len(content),
            )
            status, *_ = statuses_in(targets.server.answer_to(head + content)) or [0]
            expect(400 <= status < 500, f"{method} {path[:60]}: {status}")
            answers.append(str(status))
    models = [path.name for path in (targets.server.home / "models").iterdir()]
    expect(models == [MODEL], f"models: {models}")
    expect(not list(Path("/etc").glob("evil*")), "/etc/evil was written")
    return counted(answers)


def _refuse_plans(targets: Targets, *plans: str) -> str:
    def upload(plan: str) -> str:
        files = targets.files("x") | {"plan": ("plan.yaml", plan.encode())}
        return refused_upload(targets.server, plan[:60], files, 413, 422)

    return counted(map(upload, plans))
