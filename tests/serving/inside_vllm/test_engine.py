"""The pruned engine gives what the pruned library gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import forced, greedy, prompts_of, run
from transformers import DynamicCache

import stageprune as sp
from stageprune.cli.app import run as cli
from stageprune.evaluate.calibration import Reading
from stageprune.models import folder_of, load
from stageprune.prefill.projections import Correction, KVProjections, fitted_setting, identity
from stageprune.serving.vllm.check import check_engine
from stageprune.serving.vllm.check_worker import random_model
from stageprune.serving.vllm_plugin import FAMILIES

RATIO, NEW = 0.34, 16


@pytest.fixture(scope="module")
def demo_folder() -> str:
    """Where the demo model lies for other engines."""
    return folder_of("demo")


@pytest.fixture(scope="module")
def prompts(demo: Any) -> list[list[int]]:
    """Fifty."""
    return prompts_of(demo.tokenizer, 50)


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """The library's answers in float32."""
    model = load("demo", dtype="float32").model
    with sp.prune(model, sp.PrefillOnlyPruning(ratio=RATIO)):
        yield greedy(model, prompts, NEW)


def engine(folder: str, dtype: str = "float32", override: Any = None, **options: Any) -> dict[str, Any]:
    return {
        "model": folder, "dtype": dtype, "enforce_eager": True, "max_model_len": 1024, "block_size": 32, "seed": 0,
        "max_num_seqs": 8, "hf_overrides": {"stageprune": {"ratio": RATIO} if override is None else override},
    } | options  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    [result] = check_engine([family], again=True)
    assert result.right, str(result)
    assert result.dtype == "float32"
    assert result.agreeing == result.tokens == 240


def test_the_check_sees_a_changed_engine(demo_folder: str, prompts: list[list[int]], expected: Any) -> None:
    """One whose cache is not written where the plugin thinks."""
    setup = "import stageprune.serving.vllm.compat as c; c.write_cache = lambda *args: None"
    [answers] = run(engine(demo_folder), prompts[:6], setup=setup, max_tokens=NEW)
    assert [one.tokens for one in answers] != expected[:6]


@pytest.mark.parametrize("chunk", [64, 512])
def test_float32_equals_the_library(chunk: int, demo_folder: str, prompts: list[list[int]], expected: Any) -> None:
    """Mixed batches, chunks that cut prompts anywhere, and in the second round hits in the prefix cache."""
    first, second = run(engine(demo_folder, max_num_batched_tokens=chunk), prompts, rounds=2, max_tokens=NEW)
    assert [one.tokens for one in first] == expected
    assert [one.tokens for one in second] == expected
    assert sum(one.cached for one in second) > 1000


def test_preempted_requests_go_on_as_if_nothing_had_happened(
    demo_folder: str, demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds less than the requests that run: some are computed again, with what they had generated."""
    few = prompts_of(demo.tokenizer, 50)[1::5][:6]
    setup = (
        "import os, vllm.v1.core.sched.scheduler as s\n"
        "original = s.Scheduler._preempt_request\n"
        "def counted(self, *args, **kwargs):\n"
        "    open(os.environ['STAGEPRUNE_TEST_MARK'], 'a').write('x')\n"
        "    return original(self, *args, **kwargs)\n"
        "s.Scheduler._preempt_request = counted\n"
    )
    mark = tmp_path / "preempted"
    monkeypatch.setenv("STAGEPRUNE_TEST_MARK", str(mark))
    options = dict(num_gpu_blocks_override=14, max_model_len=384, enable_prefix_caching=False)
    [answers] = run(engine(demo_folder, **options), few, setup=setup, max_tokens=96)
    assert mark.exists(), "nothing was preempted"
    with sp.prune(demo.model, sp.PrefillOnlyPruning(ratio=RATIO)):
        assert [one.tokens for one in answers] == greedy(demo.model, few, 96)


def test_bfloat16_is_as_close_as_the_engine_itself(demo_folder: str, prompts: list[list[int]], demo: Any) -> None:
    """Against the library in float32; without pruning the engine's own rounding is as large."""
    [pruned] = run(engine(demo_folder, "bfloat16"), prompts, max_tokens=NEW)
    [plain] = run(engine(demo_folder, "bfloat16", False), prompts, max_tokens=NEW)
    off = {}
    for name, answers, ratio in (("pruned", pruned, RATIO), ("plain", plain, 0.0)):
        with sp.prune(demo.model, sp.PrefillOnlyPruning(ratio=ratio)) as handle:
            found = [
                forced(demo.model, handle, prompt, one.tokens) for prompt, one in zip(prompts, answers, strict=True)
            ]
        same = sum(
            a == b for (best, _), one in zip(found, answers, strict=True) for a, b in zip(best, one.tokens, strict=True)
        )
        assert same >= 0.95 * NEW * len(prompts), name
        off[name] = sorted(abs(first - one.first) for (_, first), one in zip(found, answers, strict=True))
    assert off["pruned"][25] <= 0.05  # the median
    assert off["pruned"][25] <= 2 * off["plain"][25]


def test_ratio_0_is_the_plain_engine(demo_folder: str, prompts: list[list[int]]) -> None:
    [zero] = run(engine(demo_folder, "bfloat16", {"ratio": 0.0}), prompts[:20], max_tokens=NEW)
    [plain] = run(engine(demo_folder, "bfloat16") | {"hf_overrides": {}}, prompts[:20], max_tokens=NEW)
    assert zero == plain


def test_drafts_are_verified_as_decode_rows(demo_folder: str, prompts: list[list[int]], expected: Any) -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    [answers] = run(engine(demo_folder, speculative_config=drafting), prompts[:12], max_tokens=NEW)
    assert [one.tokens for one in answers] == expected[:12]


def test_layers_anywhere(demo_folder: str, prompts: list[list[int]], demo: Any) -> None:
    layers = [0, 5, 6, 20, 29]
    [answers] = run(engine(demo_folder, override={"layers": layers}), prompts[:8], max_tokens=NEW)
    with sp.prune(demo.model, sp.PrefillOnlyPruning(layers=layers)):
        assert [one.tokens for one in answers] == greedy(demo.model, prompts[:8], NEW)


def test_fitted_projections(demo_folder: str, prompts: list[list[int]], demo: Any, tmp_path: Path) -> None:
    fitted = str(tmp_path / "fitted")
    command = ["calibrate", "demo", "--ratio", str(RATIO), "--samples", "10", "--output", fitted]
    assert cli([*command, "--prompt-tokens", "128", "--dtype", "float32"]) == 0
    override = {"projections": fitted}
    first, second = run(engine(demo_folder, override=override), prompts[:12], rounds=2, max_tokens=NEW)
    with sp.prune(demo.model, sp.PrefillOnlyPruning(ratio=RATIO)):
        unfitted = greedy(demo.model, prompts[:12], NEW)
    with sp.prune(demo.model, fitted_setting(fitted)):
        expected = greedy(demo.model, prompts[:12], NEW)
    assert expected != unfitted
    assert [one.tokens for one in first] == expected
    assert [one.tokens for one in second] == expected
    # The instance without the deep layers takes them, too; its tokens say nothing.
    run(engine(demo_folder, override=override | {"role": "prefill"}), prompts[:2], max_tokens=1)
    loaded = KVProjections.load(fitted)
    model = loaded.record["model"] | {"weights": {"bfloat16": "another", "float16": "another"}}
    KVProjections(loaded.corrections, {**loaded.record, "model": model}).save(tmp_path / "other")
    with pytest.raises(AssertionError, match="fitted for another model"):
        run(engine(demo_folder, override={"projections": str(tmp_path / "other")}), prompts[:1], max_tokens=1)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each of two workers needs a core of its own")
def test_two_workers_share_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallelism; of fitted projections each worker takes its heads."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model, layers = random_model("Qwen2"), (2, 3, 5)
    model.save_pretrained(tmp_path / "model")
    reading = Reading(model, layers, attention=False)
    noise = torch.Generator().manual_seed(1)
    corrections = {
        layer: Correction.of(
            0.1 * torch.randn(own.weight.shape, generator=noise), 0.1 * torch.randn(own.bias.shape, generator=noise)
        )
        for layer, own in reading.own.items()
    }
    record = {"model": identity(reading.decoder, reading.own), "settings": {}, "measured": []}
    KVProjections(corrections, record).save(tmp_path / "fitted")
    prompts = [torch.randint(3, 503, (length,), generator=noise).tolist() for length in (1, 31, 33, 64, 97, 190)]
    options = dict(max_model_len=256, max_num_batched_tokens=48, skip_tokenizer_init=True, tensor_parallel_size=2)
    for override in ({"layers": list(layers)}, {"projections": str(tmp_path / "fitted")}):
        rounds = run(
            engine(str(tmp_path / "model"), override=override, **options), prompts, rounds=2, max_tokens=NEW,
            detokenize=False,
        )  # fmt: skip
        with sp.prune(model, sp.PrefillOnlyPruning(layers=layers, projections=override.get("projections"))):
            expected = greedy(model, prompts, NEW)
        for answers in rounds:
            assert [one.tokens for one in answers] == expected


def test_the_next_turn_reads_answers_as_prompts_unless_they_are_shared(
    demo_folder: str, prompts: list[list[int]], demo: Any
) -> None:
    """Whole blocks of an answer: of its 70 tokens, at least one is."""
    few, follow, new = prompts[1:4], [198, 1, 4093, 198], 70
    exact = run(engine(demo_folder), few, rounds=2, follow=follow, max_tokens=new)
    shared = run(
        engine(demo_folder, override={"ratio": RATIO, "prefix_cache": "shared"}),
        few, rounds=2, follow=follow, max_tokens=new,
    )  # fmt: skip
    assert [one.tokens for one in shared[0]] == [one.tokens for one in exact[0]]
    with sp.prune(demo.model, sp.PrefillOnlyPruning(ratio=RATIO)) as handle:
        for prompt, first, second, other in zip(few, exact[0], exact[1], shared[1], strict=True):
            turn = prompt + first.tokens + follow
            assert second.cached == (len(prompt) - 1) // 32 * 32
            assert [second.tokens] == greedy(demo.model, [turn], new)
            assert other.cached == (len(prompt) + new - 1) // 32 * 32
            cache = DynamicCache(config=demo.model.config)
            with torch.no_grad():
                with handle.stage(len(prompt) - 1):
                    demo.model(torch.tensor([turn[: other.cached]]), past_key_values=cache, logits_to_keep=1)
                rest = turn[other.cached :]
                with handle.stage(len(rest) - 1):
                    tokens = torch.tensor([rest + other.tokens[:-1]])
                    logits = demo.model(tokens, past_key_values=cache, logits_to_keep=new).logits[0]
            assert logits.argmax(-1).tolist() == other.tokens


@pytest.mark.parametrize(
    ("override", "options", "message"),
    [
        ({"ratio": 2}, {}, "ratio must satisfy"),
        ({"kv_projection": False}, {}, "ablation"),
        ({"ratio": 0.3, "role": "both", "typo": 1}, {}, "unknown setting"),
        ({"ratio": 0.3}, {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}, "mix"),
        ({"ratio": 0.3}, {"enable_lora": True}, "LoRA"),
    ],
)
def test_refused(override: Any, options: dict[str, Any], message: str, demo_folder: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run(engine(demo_folder, override=override, **options), [[1, 2, 3]], max_tokens=1)


def test_log_probabilities_of_the_prompt_are_refused(demo_folder: str) -> None:
    with pytest.raises(AssertionError, match="need every layer"):
        run(engine(demo_folder), [[1, 2, 3]], max_tokens=1, prompt_logprobs=0)


def test_another_version_is_refused_only_where_pruning_is_asked_for(demo_folder: str) -> None:
    setup = "import stageprune.serving.vllm.compat as c; c.TESTED = ('0.1',)"
    with pytest.raises(AssertionError, match=r"was tested with vLLM 0.1, and vLLM .* is installed"):
        run(engine(demo_folder), [[1, 2, 3]], max_tokens=1, setup=setup)
    [[answer]] = run(engine(demo_folder) | {"hf_overrides": {}}, [[1, 2, 3]], max_tokens=1, setup=setup)
    assert len(answer.tokens) == 1


def test_prefill_and_decode_instances(
    demo_folder: str, prompts: list[list[int]], expected: Any, tmp_path: Path
) -> None:
    """One without the deep layers encodes, another decodes; the cache goes through files."""
    # This connector writes one block more than it looks for after 32k + 1 tokens, and does not know of chunks.
    long = [index for index, prompt in enumerate(prompts) if len(prompt) > 128 and len(prompt) % 32 != 1][:6]
    transfer = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }  # fmt: skip
    options = dict(kv_transfer_config=transfer, enable_prefix_caching=False, max_num_batched_tokens=4096)
    chosen = [prompts[index] for index in long]
    run(engine(demo_folder, override={"ratio": RATIO, "role": "prefill"}, **options), chosen, max_tokens=1)
    assert [path.name.startswith("stageprune-") for path in tmp_path.iterdir()] == [True]
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert len(stored) == 30 * len(long)
    [answers] = run(engine(demo_folder, **options), chosen, max_tokens=NEW)
    assert [one.tokens for one in answers] == [expected[index] for index in long]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == stored  # read, not written
    # Another setting finds nothing there.
    run(engine(demo_folder, override={"ratio": 0.2}, **options), chosen[:1], max_tokens=1)
    assert len(list(tmp_path.iterdir())) == 2
