"""The process of a peer: `python -m stageprune.evaluate.peers.worker NAME MODEL OPTIONS`.

It loads the model, says so in a line, and then answers each line `{"prompts": [[token ids], ...], "new_tokens": n}`
with `{"first_s": ..., "total_s": ...}`; see `process.ProcessPeer`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from stageprune.evaluate.peers.process import PREFIX

Answer = Callable[[Sequence[list[int]], int], tuple[float, float]]
"""From prompts and a number of new tokens to the seconds until the first and until the last token."""

FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 7: "Q8_0", 15: "Q4_K_M", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16"}
"""Of `general.file_type` in a GGUF file, as llama.cpp numbers them."""


def llama_cpp(model: str, options: dict[str, Any]) -> tuple[str, Answer]:
    """llama.cpp through llama-cpp-python's `Llama.generate`, one prompt at a time."""
    from llama_cpp import Llama

    llama = Llama(
        model_path=model, n_ctx=options["context"], n_batch=512, n_threads=options["threads"],
        n_threads_batch=options["threads"], n_gpu_layers=-1 if options["gpu"] else 0, verbose=False,
    )  # fmt: skip

    def answer(prompts: Sequence[list[int]], new_tokens: int) -> tuple[float, float]:
        if len(prompts) > 1:
            raise ValueError("llama-cpp-python answers one prompt at a time; give --batch 1")
        llama.reset()  # or it would keep what the prompt shares with the last one
        start = time.perf_counter()
        first = 0.0
        for index, _ in enumerate(llama.generate(prompts[0], temp=0.0)):
            if index == 0:
                first = time.perf_counter() - start
            if index + 1 == new_tokens:
                break
        return first, time.perf_counter() - start

    kind = str(llama.metadata.get("general.file_type", ""))
    precision = FILE_TYPES.get(int(kind), f"file type {kind}") if kind.isdigit() else "as in the GGUF file"
    return f"GGUF {precision}", answer


def vllm(model: str, options: dict[str, Any]) -> tuple[str, Answer]:
    """vLLM through `LLM.generate`, all prompts at once, without its prefix cache: turns have the same prompts."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype=options["dtype"], max_model_len=options["context"], enable_prefix_caching=False,
        disable_log_stats=True,
    )  # fmt: skip

    def timed(prompts: Sequence[list[int]], tokens: int) -> float:
        parameters = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        return time.perf_counter() - start

    def answer(prompts: Sequence[list[int]], new_tokens: int) -> tuple[float, float]:
        # The whole answer comes at once, so the first token has a call of its own.
        first = timed(prompts, 1)
        return first, first if new_tokens == 1 else timed(prompts, new_tokens)

    return options["dtype"], answer


PEERS: dict[str, Callable[[str, dict[str, Any]], tuple[str, Answer]]] = {"llama.cpp": llama_cpp, "vllm": vllm}


def main(arguments: Sequence[str]) -> None:
    """Serve one peer until the input ends."""
    name, model, options = arguments
    try:
        precision, answer = PEERS[name](model, json.loads(options))
    except Exception as error:  # noqa: BLE001  (whatever a library raises, the user shall read it)
        _say({"error": _reason(error)})
        return
    _say({"precision": precision})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            first, total = answer(request["prompts"], request["new_tokens"])
        except Exception as error:  # noqa: BLE001
            _say({"error": _reason(error)})
            continue
        _say({"first_s": first, "total_s": total})


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _say(data: dict[str, Any]) -> None:
    print(PREFIX + json.dumps(data), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
