"""The devices of this host, and the policy for their use."""
