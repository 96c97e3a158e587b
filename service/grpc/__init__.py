"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`, in the process and the
event loop of the HTTP server.
"""

import os

# Before gRPC is imported: no child of the server uses gRPC, and for each that is forked it would
# write a line among those of the log, which are JSON.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
