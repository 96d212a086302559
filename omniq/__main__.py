"""``python -m omniq`` is the ``omniq`` command."""

from omniq.cli.main import main

if __name__ == "__main__":
    main()
