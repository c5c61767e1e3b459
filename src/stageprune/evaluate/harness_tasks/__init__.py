"""Tasks for lm-evaluation-harness that need no hub: YAML files, and the functions that they name."""
