"""The parts of gRPC that need no client of a stranger: generated files, the table of statuses,
faults, figures, and TLS.
"""

import asyncio
import re
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import httpx
import numpy as np
import psutil
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from pipeline.errors import HostError, UserError
from service.errors import Answer, ServiceError, TooMany, Unauthorized, answer_to
from service.grpc import dispatcher, generate, health_pb2
from service.grpc import grpc_service_pb2 as pb
from service.grpc.descriptors import HEALTH, SERVICE
from service.grpc.methods import METHODS
from service.grpc.server import RpcServer, rpc_server
from service.grpc.statuses import STATUSES, details_of, metadata_of, status_of
from service.limits.key_limits import KeyLimits
from service.settings import MIB, Settings
from service.storage.audit import Audit
from service.storage.audit_entry import Filter
from service.tls import tls_from
from tests.service.builders.app import Desk, at_desk
from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import DoubleServing
from tests.service.builders.tensors import Request, message_of, method_of
from tests.service.integration.test_server import command, until


def kinds(root: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_what_is_generated_is_that_of_the_definitions(tmp_path: Path) -> None:
    """`make protos` mends it."""
    generate.generate(tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [
        "descriptors.binpb",
        "grpc_service_pb2.pyi",
        "health_pb2.pyi",
        "model_config.binpb",
        "model_config_pb2.pyi",
    ]
    for name in names:
        config = generate.TRITON_CONFIG
        original = config if name == config.name else generate.FOLDER / name
        assert (tmp_path / name).read_bytes() == original.read_bytes()


def test_every_refusal_has_a_status() -> None:
    assert {kind.status for kind in kinds(ServiceError)} <= set(STATUSES)
    assert status_of(answer_to(ZeroDivisionError())) is grpc.StatusCode.INTERNAL
    assert status_of(answer_to(HostError("no GPU"))) is grpc.StatusCode.UNAVAILABLE
    assert status_of(Answer(418, {})) is grpc.StatusCode.UNKNOWN


def test_what_a_refusal_says() -> None:
    full = answer_to(TooMany("the queue is full", "try later", 3))
    assert (details_of(full), metadata_of(full)) == (
        "the queue is full (try later)",
        (("crucible-code", "service.too_many"), ("retry-after", "3")),
    )
    assert details_of(answer_to(Unauthorized("no key"))) == "no key"


def test_the_methods_are_the_services() -> None:
    known = {**SERVICE.methods_by_name, **HEALTH.methods_by_name}
    assert set(HEALTH.methods_by_name) < set(METHODS) < set(known)
    for name, method in METHODS.items():
        assert method.takes.DESCRIPTOR.full_name == known[name].input_type.full_name


@pytest.mark.parametrize(
    ("trusted", "client"), [("127.0.0.1", "192.0.2.7"), ("10.0.0.9", "127.0.0.1")]
)
def test_failed_calls_count_for_the_client_of_a_trusted_proxy(
    tmp_path: Path, trusted: str, client: str
) -> None:
    """A forged header from elsewhere is ignored; what stands before the last address is, too."""

    async def story(desk: Desk) -> None:
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            async with grpc.aio.insecure_channel(rpc.address) as channel:
                metadata = (("x-forwarded-for", "127.0.0.1"), ("x-forwarded-for", "192.0.2.7"))
                call: Any = channel.unary_unary(f"/{SERVICE.full_name}/ServerMetadata")
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(b"", metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        audit = Audit(desk.service.database)
        end = time.monotonic() + WITHIN_S
        while not (entries := audit.entries(Filter(action="authentication.refused"), 10)):
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        assert {entry.address for entry in entries} == {client}

    at_desk(tmp_path, story, keys_required=True, trusted_proxies=(trusted,))


def test_health_is_told_without_a_key_and_watched_until_the_end(tmp_path: Path) -> None:
    def status(data: object) -> str:
        answer = health_pb2.HealthCheckResponse.FromString(data)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def story(desk: Desk) -> None:
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            async with grpc.aio.insecure_channel(rpc.address) as channel:
                check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
                watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
                ours, other = (
                    health_pb2.HealthCheckRequest(service=name).SerializeToString()
                    for name in (SERVICE.full_name, "other")
                )
                watched, unknown = watch(b""), watch(other)
                assert [status(await check(each)) for each in (b"", ours)] == ["SERVING", "SERVING"]
                assert [status(await each.read()) for each in (watched, unknown)] == [
                    "SERVING",
                    "SERVICE_UNKNOWN",
                ]
                with pytest.raises(grpc.aio.AioRpcError, match="no service 'other'") as error:
                    await check(other)
                assert error.value.code() is grpc.StatusCode.NOT_FOUND
                await desk.service.stop()
                assert (status(await check(b"")), status(await watched.read())) == (
                    "NOT_SERVING",
                    "NOT_SERVING",
                )
                await rpc.stop()
                assert (await watched.read(), await watched.code()) == (
                    grpc.aio.EOF,
                    grpc.StatusCode.OK,
                )
                assert await unknown.code() is grpc.StatusCode.OK

    at_desk(tmp_path, story, port=0, keys_required=True)


class Faulty(DoubleServing):
    async def infer(self, request: object) -> NoReturn:
        raise ZeroDivisionError(f"/home/of/the/service {request}")


def test_our_own_fault_is_told_without_its_trace_and_the_server_lives(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.service.serving = Faulty()
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            async with grpc.aio.insecure_channel(rpc.address) as channel:
                infer: Any = channel.unary_unary(f"/{SERVICE.full_name}/ModelInfer")
                data = message_of(Request("same_float32", [[1.0]])).SerializeToString()
                for _ in range(2):
                    with pytest.raises(grpc.aio.AioRpcError) as error:
                        await infer(data, metadata=(("x-request-id", "r17"),))
                    assert error.value.code() is grpc.StatusCode.INTERNAL
                    assert "logged as request r17" in str(error.value.details())
                    assert "ZeroDivision" not in str(error.value)
                with pytest.raises(
                    grpc.aio.AioRpcError, match=r"this is no inference\.ModelInferRequest"
                ):
                    await infer(b"\xff" * 100)
                guess: Any = channel.unary_unary("/inference.GRPCInferenceService/Guess")
                with pytest.raises(grpc.aio.AioRpcError, match="is no method of"):
                    await guess(b"")
                stream: Any = channel.stream_stream(f"/{SERVICE.full_name}/ModelStreamInfer")(
                    iter([data])
                )
                assert (
                    "an error inside the service"
                    in pb.ModelStreamInferResponse.FromString(await stream.read()).error_message
                )
                abandoned: Any = channel.stream_stream(f"/{SERVICE.full_name}/ModelStreamInfer")()
                await abandoned.write(data)
                await abandoned.read()
                abandoned.cancel()
                async with asyncio.timeout(WITHIN_S):
                    while 'status="CANCELLED"' not in desk.service.metrics.text().decode():
                        await asyncio.sleep(0.01)
        text = desk.service.metrics.text().decode()
        assert 'crucible_grpc_requests_total{method="ModelInfer",status="INTERNAL"} 2.0' in text
        assert (
            'crucible_grpc_requests_total{method="ModelInfer",status="INVALID_ARGUMENT"} 1.0'
            in text
        )
        assert 'crucible_grpc_requests_total{method="none",status="UNIMPLEMENTED"} 1.0' in text
        assert 'crucible_grpc_requests_total{method="ModelStreamInfer",status="OK"} 1.0' in text
        assert (
            'crucible_grpc_requests_total{method="ModelStreamInfer",status="CANCELLED"} 1.0' in text
        )
        assert 'crucible_grpc_request_seconds_count{method="ModelInfer"} 3.0' in text

    at_desk(tmp_path, story, port=0)


def test_one_key_cannot_open_all_streams_nor_send_all_requests(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.service.serving = Faulty()
        data = message_of(Request("same_float32", [[1.0]])).SerializeToString()
        metadata = (("authorization", desk.key("infer")["Authorization"]),)
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            async with grpc.aio.insecure_channel(rpc.address) as channel:
                streaming: Any = channel.stream_stream(f"/{SERVICE.full_name}/ModelStreamInfer")
                stream = streaming(metadata=metadata)  # the first request of the key
                await stream.write(data)  # the second
                await stream.read()
                with pytest.raises(grpc.aio.AioRpcError, match="max_streams") as error:
                    await streaming(iter([data]), metadata=metadata).read()
                assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                limits = desk.service.limits
                assert isinstance(limits, KeyLimits)
                limits._clock_ns = lambda: 0  # no time passes
                answers = []
                for _ in range(4):
                    await stream.write(data)
                    answer = pb.ModelStreamInferResponse.FromString(await stream.read())
                    answers.append("max_requests_per_s" in answer.error_message)
                assert answers[-1]  # and the stream goes on
                await stream.done_writing()
                assert await stream.read() is grpc.aio.EOF
        assert sum(limits._streams.values()) == 0

    at_desk(tmp_path, story, port=0, keys_required=True, max_streams=1, max_requests_per_s=3)


def test_messages_count_until_their_answers(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.service.serving = DoubleServing()
        data = message_of(Request("same_float32", [[1.0] * 1000])).SerializeToString()
        budget = desk.service.bytes_in_flight
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            async with grpc.aio.insecure_channel(rpc.address) as channel:
                infer: Any = channel.unary_unary(f"/{SERVICE.full_name}/ModelInfer")
                stream: Any = channel.stream_stream(f"/{SERVICE.full_name}/ModelStreamInfer")()
                with budget.share() as others:
                    others.grow(MIB - len(data) + 1)
                    with pytest.raises(grpc.aio.AioRpcError, match="more than 1048576") as error:
                        await infer(data)
                    await stream.write(data)
                    refusal = pb.ModelStreamInferResponse.FromString(await stream.read())
                    assert "more than 1048576 bytes together" in refusal.error_message
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
                assert error.value.trailing_metadata()["retry-after"] == "5"
                await stream.write(data)
                answer = pb.ModelStreamInferResponse.FromString(await stream.read())
                assert not answer.error_message
                assert await infer(data)
                await stream.done_writing()
                assert await stream.read() is grpc.aio.EOF
        assert budget.held == 0

    at_desk(tmp_path, story, port=0, max_infer_bytes=MIB, max_bytes_in_flight=MIB)


def test_a_message_that_does_not_come_counts_as_the_largest_and_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "FREE_S", 0.1)
    monkeypatch.setattr(dispatcher, "SLACK_S", 3.0)

    async def story(desk: Desk) -> None:
        budget = desk.service.bytes_in_flight
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            async with grpc.aio.insecure_channel(rpc.address) as channel:
                infer: Any = channel.stream_unary(f"/{SERVICE.full_name}/ModelInfer")
                first = infer()
                await until_true(lambda: budget.held == MIB)
                second = infer()
                assert await second.code() is grpc.StatusCode.UNAVAILABLE
                assert "more than 1048576 bytes together" in await second.details()
                check: Any = channel.stream_unary("/grpc.health.v1.Health/Check")
                assert await check().code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert await first.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert "not complete after 3 s" in await first.details()
        assert budget.held == 0

    at_desk(tmp_path, story, port=0, max_infer_bytes=MIB, max_bytes_in_flight=MIB)


async def until_true(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not reached():
            await asyncio.sleep(0.01)


def test_calls_and_connections_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            async with grpc.aio.insecure_channel(rpc.address) as channel:
                check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
                watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
                watched = watch(b"")
                assert await watched.read()
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await check(b"")
                assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                reader, writer = await asyncio.open_connection(*rpc.address.split(":"))
                assert await asyncio.wait_for(reader.read(1), WITHIN_S) == b""
                writer.close()
                watched.cancel()

    at_desk(tmp_path, story, port=0, max_connections=1)


def test_long_lists_of_numbers_are_read_by_a_helper_and_nobody_waits_for_them(
    tmp_path: Path,
) -> None:
    values = np.arange(20_000, dtype=np.float32)
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=(1, 20_000))
    tensor.contents.fp32_contents.extend(values.tolist())
    message = pb.ModelInferRequest(model_name="same_float32", inputs=[tensor], id="seven")
    long, short = (
        each.SerializeToString() for each in (message, message_of(Request("same_float32", [[1.0]])))
    )
    tensor.shape[:] = [2, 20_000]
    wrong = pb.ModelInferRequest(
        model_name="same_float32", inputs=[tensor], id="eight"
    ).SerializeToString()

    async def story(desk: Desk) -> None:
        desk.service.serving = DoubleServing()
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            async with grpc.aio.insecure_channel(rpc.address) as channel:
                infer: Any = channel.unary_unary(f"/{SERVICE.full_name}/ModelInfer")
                answer = pb.ModelInferResponse.FromString(await infer(long))
                assert (answer.id, answer.raw_output_contents[0]) == ("seven", values.tobytes())
                stream: Any = channel.stream_stream(f"/{SERVICE.full_name}/ModelStreamInfer")(
                    iter([wrong])
                )
                response = pb.ModelStreamInferResponse.FromString(await stream.read())
                assert "shape [2, 20000] has 40000 values, got 20000" in response.error_message
                assert response.infer_response.id == "eight"
                (helper,) = [
                    child
                    for child in psutil.Process().children()
                    if "service.grpc.offload_worker" in child.cmdline()
                ]
                helper.suspend()
                waiting = asyncio.ensure_future(infer(long).code())
                for _ in range(3):
                    assert (
                        pb.ModelInferResponse.FromString(await infer(short)).raw_output_contents[0]
                        == np.float32(1).tobytes()
                    )
                assert not waiting.done()
                helper.kill()
                assert await waiting is grpc.StatusCode.UNAVAILABLE
                assert len(await infer(long)) > values.nbytes
        assert not [
            child
            for child in psutil.Process().children()
            if "service.grpc.offload_worker" in child.cmdline()
        ]

    at_desk(tmp_path, story, port=0)


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            port = int(rpc.address.rpartition(":")[2])
            desk.service.settings = desk.service.settings.model_copy(update={"grpc_port": port})
            with pytest.raises(
                HostError, match=f"cannot listen on 127.0.0.1, port {port}, for gRPC"
            ):
                RpcServer(desk.service, None)

    at_desk(tmp_path, story, port=0)


def test_without_grpc_there_is_no_port(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is None

    at_desk(tmp_path, story, grpc=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Certificate, key, and the authority that signed it."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for number, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(folder / "certificate.pem", append=number > 0)
    authority.cert_pem.write_to_path(folder / "authority.pem")
    return folder / "certificate.pem", folder / "key.pem", folder / "authority.pem"


def test_both_ports_speak_tls(tmp_path: Path, certificate: tuple[Path, Path, Path]) -> None:
    chain, key, authority = certificate
    line = command(
        tmp_path, "tests.service.builders.serving_models", tls_certificate=chain, tls_key=key
    )
    trusted = ssl.create_default_context(cafile=authority)
    with (
        (tmp_path / "server.log").open("w") as log,
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            url = re.fullmatch(
                r"Crucible listens on (https://127\.0\.0\.1:\d+)\n", process.stdout.readline()
            )
            rpc = re.fullmatch(r"gRPC listens on (\S+)\n", process.stdout.readline())
            assert url, (tmp_path / "server.log").read_text()
            assert rpc
            until(lambda: httpx.get(f"{url[1]}/readyz", verify=trusted).status_code == 200)
            credentials = grpc.ssl_channel_credentials(authority.read_bytes())
            with grpc.secure_channel(rpc[1], credentials) as channel:
                raw = method_of(channel, "ModelInfer")(
                    message_of(Request("same_float32", [[1.0]])), WITHIN_S
                )
                assert pb.ModelInferResponse.FromString(raw).model_name == "same_float32"
            with grpc.insecure_channel(rpc[1]) as channel, pytest.raises(grpc.RpcError) as error:
                method_of(channel, "ServerLive")(pb.ServerLiveRequest(), WITHIN_S)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(httpx.HTTPError):
                httpx.get(url[1].replace("https", "http"))
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                httpx.get(f"{url[1]}/readyz", verify=ssl.create_default_context())
            process.terminate()
            assert process.wait(WITHIN_S) == 0
        finally:
            process.kill()


def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, certificate: tuple[Path, Path, Path]
) -> None:
    chain, key, authority = certificate
    locked = tmp_path / "locked.pem"
    secret = load_pem_private_key(key.read_bytes(), None)
    locked.write_bytes(
        secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    (tmp_path / "text").write_text("no PEM")
    for first, second in (
        (authority, key),
        (tmp_path / "missing", key),
        (tmp_path / "text", key),
        (chain, chain),
        (chain, locked),
    ):
        with pytest.raises(UserError, match="cannot serve TLS with the certificate"):
            tls_from(Settings(home=tmp_path, tls_certificate=first, tls_key=second))
    assert tls_from(Settings(home=tmp_path)) is None
    certificates = tls_from(Settings(home=tmp_path, tls_certificate=chain, tls_key=key))
    assert certificates is not None
    assert certificates.key == key.read_bytes()
