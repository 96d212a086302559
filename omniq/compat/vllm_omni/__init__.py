"""omniq's stand-in for vllm-omni: what ``vllm serve MODEL --omni`` calls, and nothing else."""

PROVIDED_BY_OMNIQ = True
