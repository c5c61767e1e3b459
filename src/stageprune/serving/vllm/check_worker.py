"""The self-check's own process: tiny random models, each answered by the pruned engine and by transformers.

    python -m stageprune.serving.vllm.check_worker Llama Qwen3

prints a line of JSON for each family, after `PREFIX`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

PREFIX = "stageprune-check: "

_NEW_TOKENS = 12
_LAYERS = (2, 3, 4, 5)
# Shorter than a block, as long, one more; longer than a chunk; and some in between, so that steps mix all of it.
_LENGTHS = (1, 2, 31, 32, 33, 64, 65, 97, 130, 190)
_CHUNK, _BLOCK = 48, 32
_VOCABULARY = 503


def main(families: list[str]) -> None:
    """Check these families and print what comes out."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for family in families:
        try:
            result = _check(family)
        except Exception as error:  # noqa: BLE001  whatever a changed engine raises is the result
            result = {"problem": f"{type(error).__name__}: {error}"}
        print(PREFIX + json.dumps({"family": family, **result}), flush=True)


def _check(family: str) -> dict[str, Any]:
    import torch

    model = random_model(family)
    prompts = _prompts()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        engine = _engine_answers(Path(folder), dtype, prompts)
    agreeing, off = 0, 0.0
    for prompt, answers in zip(prompts, zip(*engine, strict=True), strict=True):
        for tokens, first in answers:
            expected, first_expected = _expected(model, prompt, tokens)
            agreeing += sum(map(int.__eq__, tokens, expected))
            off = max(off, abs(first - first_expected))
    total = len(engine) * len(prompts) * _NEW_TOKENS
    return {"dtype": dtype, "tokens": total, "agreeing": agreeing, "first_logprob_off": off}


def _engine_answers(folder: Path, dtype: str, prompts: list[list[int]]) -> list[list[tuple[list[int], float]]]:
    """Twice, the second time from the prefix cache: tokens, and the log-probability of the first."""
    import torch
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=_CHUNK,
        max_num_seqs=4,
        block_size=_BLOCK,
        enable_prefix_caching=True,
        disable_log_stats=True,
        gpu_memory_utilization=0.2,
        hf_overrides={"stageprune": {"layers": list(_LAYERS)}},
    )
    sampling = SamplingParams(temperature=0, max_tokens=_NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    rounds = []
    for _ in range(2):
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        rounds.append([(list(answer.token_ids), answer.logprobs[0][answer.token_ids[0]].logprob) for answer in answers])
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rounds


def _expected(model: Any, prompt: list[int], tokens: list[int]) -> tuple[list[int], float]:
    """What the pruned model of transformers says after each of the engine's tokens; and how likely the first is."""
    import torch

    from stageprune import PrefillOnlyPruning, prune

    with torch.no_grad(), prune(model, PrefillOnlyPruning(layers=_LAYERS)) as handle, handle.stage(len(prompt) - 1):
        ids = torch.tensor([prompt + tokens[:-1]])
        logits = model(ids, logits_to_keep=len(tokens)).logits[0].float()
    return logits.argmax(-1).tolist(), float(logits[0].log_softmax(-1)[tokens[0]])


def _prompts() -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, _VOCABULARY, (length,), generator=generator).tolist() for length in _LENGTHS]


def random_model(family: str) -> Any:
    """A small one of float32, whose answers depend on everything."""
    import torch
    import transformers

    options: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    name = "Gemma3Text" if family == "Gemma3" else family
    if family == "Gemma3":
        options |= {"sliding_window": 40, "query_pre_attn_scalar": 32}
    if family == "Mistral":
        options |= {"sliding_window": None}
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    # Fresh models have norms of one and biases of zero, which hide errors, and hardly look at the prompt.
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.2 * noise if parameter.ndim == 1 else 0.12 * noise)
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
