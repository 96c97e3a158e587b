"""/v1: language models over the HTTP API of OpenAI, for its unmodified clients."""
