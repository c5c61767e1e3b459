"""The command line: `stageprune generate | analyze | plan | calibrate | compare | bench | serve | doctor`."""

from stageprune.cli.app import main

__all__ = ["main"]
