"""``vllm serve MODEL --omni`` and ``vllm-omni serve MODEL`` are ``omniq serve MODEL``."""

from omniq.cli.serve import serve_main


def main() -> None:
    """Run ``omniq serve`` with this process's arguments, under the name it was called by."""
    serve_main()
