"""Tasks of lm-evaluation-harness that need no network: YAML files on JSON files, in a folder that a test names."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = [
    {
        "question": f"{'word ' * (index % 4)}What is {index}?",
        "choices": ["a", f"b{index}", "cd", "a"],
        "answer": index % 3,
    }
    for index in range(7)
]
TEXTS = [{"text": f"Number {index}. " * (1 + 3 * index)} for index in range(4)]

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
"""
LAST_WORD = """
task: local_last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{choices[1]}}}}"
metric_list:
  - metric: perplexity
  - metric: acc
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
"""
GENERATE = """
task: local_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6, do_sample: false}}
metric_list:
  - metric: exact_match
"""
GROUP = """
group: local_group
task: [local_choice, local_last_word]
aggregate_metric_list:
  - metric: acc
    weight_by_size: true
"""


def write_tasks(folder: Path) -> Path:
    """Write all of them; returns the folder, for `--include-path`."""
    folder.mkdir()
    for name, rows in (("questions", QUESTIONS), ("texts", TEXTS)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = {"choice": CHOICE, "last_word": LAST_WORD, "generate": GENERATE, "rolling": ROLLING}
    for name, content in tasks.items():
        data = folder / ("texts.jsonl" if name == "rolling" else "questions.jsonl")
        (folder / f"{name}.yaml").write_text(content.format(data=data, cache=folder / "cache"))
    (folder / "group.yaml").write_text(GROUP)
    return folder
