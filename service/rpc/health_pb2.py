"""Messages of protos/health.proto; the .pyi beside this file names them."""

from service.rpc.pool import names_of

globals().update(names_of("health.proto"))
