"""The OpenAI-compatible routes: jobs of pipelines in OpenAI's words.

``schemas`` is what clients send, ``mapping`` turns it into jobs, ``running`` waits for them,
``answers`` and ``stream`` turn them into what clients get, ``faults`` has the errors, ``routes``
puts them together. Pictures have their own: ``image_mapping``, ``image_form`` and ``images``.
"""
