"""The AR engine on vLLM, one concern a module; the engine itself is :mod:`omniq.engines.ar_vllm`.

Only :mod:`omniq.engines.vllm.contract` imports vLLM.
"""
