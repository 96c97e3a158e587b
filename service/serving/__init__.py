"""Serving of models: deployments, batching, and one worker process for each instance."""
