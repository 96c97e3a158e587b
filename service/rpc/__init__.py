"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`, in the process and the event loop of the HTTP server."""
