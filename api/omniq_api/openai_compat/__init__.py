"""The OpenAI-compatible routes: jobs of one-stage AR pipelines in OpenAI's words.

``schemas`` is what clients send, ``mapping`` turns it into jobs, ``answers`` and ``stream`` turn
jobs into what clients get, ``faults`` has the errors, ``routes`` puts them together.
"""
