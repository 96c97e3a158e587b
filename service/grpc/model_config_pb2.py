"""Messages of protos/model_config.proto; the .pyi beside this file names them."""

from service.grpc.descriptors import names_of

globals().update(names_of("model_config.proto"))
