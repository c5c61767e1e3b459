"""An engine in a process of its own, and what the library says to the same prompts.

echo '{"engine": {...}, "prompts": [[...]], "sampling": {...}, "rounds": 1, ...}' | python engine_runs.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch

PREFIX = "engine: "


@dataclass(frozen=True)
class Answer:
    """What an engine said to one prompt."""

    tokens: list[int]
    first: float
    cached: int


def run(
    engine: dict[str, Any],
    prompts: list[list[int]],
    rounds: int = 1,
    setup: str = "",
    follow: list[int] | None = None,
    **sampling: Any,
) -> list[list[Answer]]:
    """The answers of each round; raises AssertionError with the process's last words if it fails.

    Every round has the same prompts; with `follow`, the ones before, their answers, and these tokens.
    """
    job = json.dumps(
        {"engine": engine, "prompts": prompts, "rounds": rounds, "setup": setup, "follow": follow, "sampling": sampling}
    )
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.run(
        [sys.executable, __file__], input=job, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    for line in process.stdout.splitlines():
        if line.startswith(PREFIX):
            return [[Answer(*one) for one in each] for each in json.loads(line.removeprefix(PREFIX))]
    raise AssertionError(process.stderr[-3000:])


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Prompts of a chat about technical prose, 30 to 400 tokens and a few around the size of a block."""
    names, prompts = sorted(topics), []
    for index in range(count):
        body = tokenizer(topics[names[index * len(names) // count]]).input_ids
        if index % 5 == 4:
            prompts.append(body[: (1, 2, 31, 32, 33, 64, 65, 128, 129, 256)[index // 5 % 10]])
            continue
        text = tokenizer.decode(body[: (30, 80, 200, 400)[index % 5 % 4]])
        messages = [{"role": "user", "content": "Explain in your own words:\n" + text}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return prompts


def greedy(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The library's answers, one prompt after the other."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = dict(attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers.append(model.generate(ids, max_new_tokens=new_tokens, **options)[0, len(prompt) :].tolist())
    return answers


def forced(model: Any, handle: Any, prompt: list[int], tokens: list[int]) -> tuple[list[int], float]:
    """The likeliest token in place of each of these, and the log-probability of the first."""
    with torch.no_grad(), handle.stage(len(prompt) - 1):
        logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0].float()
    return logits.argmax(-1).tolist(), float(logits[0].log_softmax(-1)[tokens[0]])


def _main() -> None:
    job = json.loads(sys.stdin.read())
    exec(job["setup"], {})
    from vllm import LLM, SamplingParams

    engine = LLM(**job["engine"])
    sampling = SamplingParams(**{"temperature": 0, "ignore_eos": True, "logprobs": 1} | job["sampling"])
    rounds, prompts = [], job["prompts"]
    for _ in range(job["rounds"]):
        outputs = engine.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        firsts = [answer.logprobs[0][answer.token_ids[0]].logprob for answer in answers]
        if job["follow"] is not None:
            pairs = zip(prompts, answers, strict=True)
            prompts = [prompt + list(answer.token_ids) + job["follow"] for prompt, answer in pairs]
        rounds.append(
            [
                (list(answer.token_ids), first, output.num_cached_tokens or 0)
                for answer, first, output in zip(answers, firsts, outputs, strict=True)
            ]
        )
    print(PREFIX + json.dumps(rounds), flush=True)


if __name__ == "__main__":
    _main()
