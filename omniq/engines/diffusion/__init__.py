"""Denoising with stock diffusers pipelines, many requests in one transformer forward."""
