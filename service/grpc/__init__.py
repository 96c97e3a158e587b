"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`.

It runs in the process and the event loop of the HTTP server.
"""

import os

# Set before gRPC is imported: no child of the server uses gRPC. With fork support, gRPC would write
# a line that is no JSON to the log for each fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
