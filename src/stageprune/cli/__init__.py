"""The command line: `stageprune generate | analyze | plan | calibrate | compare | bench | doctor`."""

from stageprune.cli.app import main

__all__ = ["main"]
