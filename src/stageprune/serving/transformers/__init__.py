"""The server of one process, on transformers: `stageprune serve --engine transformers`."""
