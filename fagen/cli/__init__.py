"""The command line: `fagen COMMAND`."""

from fagen.cli.app import main

__all__ = ["main"]
