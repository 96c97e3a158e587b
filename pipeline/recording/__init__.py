"""Record the calls of an nn.Module in a user's script: `crucible record`."""
