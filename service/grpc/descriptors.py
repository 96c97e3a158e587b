"""The protocol's messages, in a descriptor pool of their own.

`tritonclient.grpc` enters the same names into protobuf's default pool, and a pool takes each name
once: with code as protoc generates it, a process could not import both. No generated code also
means that no version of protobuf is asked for: any that reads the file will do.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass


def _filled() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(
        (Path(__file__).parent / "descriptors.binpb").read_bytes()
    ).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _filled()
SERVICE = POOL.FindServiceByName("inference.GRPCInferenceService")
HEALTH = POOL.FindServiceByName("grpc.health.v1.Health")


def names_of(file: str) -> dict[str, object]:
    """What a module of generated code would hold: the file's message classes, and the numbers of
    its enums' values.
    """
    found = POOL.FindFileByName(file)
    numbers = {
        value.name: value.number
        for enum in found.enum_types_by_name.values()
        for value in enum.values
    }
    return {
        **{name: GetMessageClass(message) for name, message in found.message_types_by_name.items()},
        **numbers,
    }
