"""``omniq serve MODEL``: from a model's name and vLLM's flags to a running local system."""
