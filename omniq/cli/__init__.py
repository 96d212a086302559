"""The ``omniq`` command: :mod:`omniq.cli.main` assembles it, one module a group of commands."""
