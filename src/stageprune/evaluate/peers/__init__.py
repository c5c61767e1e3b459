"""What users would run the dense model with instead: each through its public interface, on the same prompts.

Plain transformers is the dense model itself. The others take turns with it; their precision is part of their label.
"""

NAMES = ("compile", "vllm", "llama.cpp")
