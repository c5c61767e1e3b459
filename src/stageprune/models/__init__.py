"""Loading: a hub id, a local folder, a GGUF file, or the demo model. Nothing here knows about pruning."""

from stageprune.models.loading import DEMO, LoadedModel, folder_of, load

__all__ = ["DEMO", "LoadedModel", "folder_of", "load"]
