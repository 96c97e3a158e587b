"""Messages of protos/grpc_service.proto; the .pyi beside this file names them."""

from service.grpc.descriptors import names_of

globals().update(names_of("grpc_service.proto"))
