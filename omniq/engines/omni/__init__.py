"""Omni models: a thinker that answers in text, a talker that says it in codes, a vocoder."""
