"""Where things are in each architecture, and the proof that they are there."""
