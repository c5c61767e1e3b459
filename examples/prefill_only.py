"""Prune the prompt of the demo model: `python examples/prefill_only.py`."""

import stageprune as sp
from stageprune.evaluate.text import prompt_of
from stageprune.models import load

model, tokenizer = load("demo", dtype="bfloat16")
prompt = prompt_of(tokenizer, 1000, "What is the text above about?")
inputs = {"input_ids": model.dummy_inputs["input_ids"].new_tensor([prompt])}

with sp.prune(model, sp.PrefillOnlyPruning(ratio=1 / 3)) as handle:
    print(handle.report(prompt_length=len(prompt)))
    answer = model.generate(**inputs, max_new_tokens=40, do_sample=False)  # pruned
print(tokenizer.decode(answer[0, len(prompt) :]))

answer = model.generate(**inputs, max_new_tokens=40, do_sample=False)  # the original model again
print(tokenizer.decode(answer[0, len(prompt) :]))
