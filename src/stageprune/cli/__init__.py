"""The command line: `stageprune generate | compare | bench | doctor`."""

from stageprune.cli.app import main

__all__ = ["main"]
