"""The stage of each position inside generate(): chunks, turns, beams, speculation, padding, other caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

import stageprune as sp
from helpers import CACHE, close, generate, left_padded, tokens
from reference.generation import greedy
from reference.prefill_oracle import gated_logits
from stageprune.stages import prompt_length
from zoo import BY_NAME

pytestmark = pytest.mark.usefixtures("everything_in_float64")

SKIPPED = (4, 5)
METHOD = sp.PrefillOnlyPruning(ratio=1 / 3)


@pytest.fixture(scope="module")
def llama():
    return BY_NAME["llama"].build()


@pytest.fixture(scope="module")
def gemma3():
    """Sliding windows of 7, shorter than the prompts."""
    return BY_NAME["gemma3"].build()


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral-sliding", "gpt-neox"])
def model(request):
    return BY_NAME[request.param].build()


@pytest.mark.parametrize("chunk", [1, 2, 5, 12, 13, 14, 100])
def test_chunked_prefill_of_any_size(model, chunk: int) -> None:
    ids = tokens(1, 13)
    expected, logits = greedy(model, SKIPPED, ids, 4)
    with sp.prune(model, METHOD):
        sequences, ours = generate(model, ids, 4, prefill_chunk_size=chunk)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


def test_unequal_lengths_in_a_batch_equal_each_prompt_alone(model) -> None:
    lengths = [14, 9, 1, 2]
    ids, mask = left_padded(lengths)
    with sp.prune(model, METHOD):
        _, together = generate(model, ids, 4, attention_mask=mask)
        for row, length in enumerate(lengths):
            _, alone = generate(model, ids[row : row + 1, -length:], 4)
            assert close(together[row : row + 1], alone) < 1e-10


def test_a_prompt_of_one_token_is_dense(model) -> None:
    ids = tokens(1, 1)
    _, dense = generate(model, ids, 3)
    with sp.prune(model, METHOD):
        _, ours = generate(model, ids, 3)
    assert torch.equal(ours, dense)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_further_turn_is_a_prefill_on_the_existing_cache(model, chunk, with_mask: bool) -> None:
    if chunk and CACHE == "past_key_values":
        pytest.skip("transformers < 5.24 cannot chunk the prefill of a further turn (it restarts at position 0)")
    first, second = tokens(1, 9), tokens(1, 7, seed=1)
    expected, _ = greedy(model, SKIPPED, first, 4)
    cache = DynamicCache(config=model.config)
    with sp.prune(model, METHOD):
        sequences, _ = generate(model, first, 4, **{CACHE: cache})
        assert torch.equal(sequences, expected)
        past = cache.get_seq_length()
        whole = torch.cat((sequences, second), dim=1)
        options = dict(attention_mask=torch.ones_like(whole)) if with_mask else {}
        if chunk:
            options["prefill_chunk_size"] = chunk
        again, ours = generate(model, whole, 4, **{CACHE: cache}, **options)
    length = whole.shape[1]
    context = torch.zeros(1, length, dtype=torch.bool)
    context[:, : first.shape[1] - 1] = True  # the first turn's prompt
    context[:, past : length - 1] = True  # what was new in the second turn, but for its last token
    expected, logits = greedy(model, SKIPPED, whole, 4, context=context)
    assert torch.equal(again, expected)
    assert close(ours, logits) < 1e-10


def test_a_further_turn_given_as_new_tokens_only(llama) -> None:
    """The mask is longer than the ids: they are new tokens on top of the cache."""
    first, second = tokens(1, 9), tokens(1, 7, seed=1)
    results = []
    with sp.prune(llama, METHOD):
        for new_only in (False, True):
            cache = DynamicCache(config=llama.config)
            sequences, _ = generate(llama, first, 4, **{CACHE: cache})
            whole = torch.cat((sequences, second), dim=1)
            ids = whole[:, cache.get_seq_length() :] if new_only else whole
            options = {CACHE: cache, "attention_mask": torch.ones_like(whole)}
            results.append(generate(llama, ids, 4, **options)[1])
    assert close(results[1], results[0]) < 1e-10


@pytest.mark.parametrize("cache", ["static", "dynamic", "offloaded"])
def test_every_kind_of_cache(model, cache: str) -> None:
    if cache == "offloaded" and not torch.cuda.is_available():
        pytest.skip("an offloaded cache needs an accelerator to offload from")
    ids, mask = left_padded([13, 8])
    expected, logits = greedy(model, SKIPPED, ids, 5, attention_mask=mask)
    with sp.prune(model, METHOD):
        sequences, ours = generate(model, ids, 5, attention_mask=mask, cache_implementation=cache)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_an_empty_static_cache_without_padding(attn: str) -> None:
    """Its buffer is longer than the prompt and there is no mask: the unwritten keys must not be attended to."""
    model = BY_NAME["llama"].build(attn=attn)
    ids = tokens(1, 13)
    expected, logits = greedy(model, SKIPPED, ids, 5)
    with sp.prune(model, METHOD):
        sequences, ours = generate(model, ids, 5, cache_implementation="static")
        _, user_cache = generate(model, ids, 5, **{CACHE: StaticCache(config=model.config, max_cache_len=64)})
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10
    assert close(user_cache, logits) < 1e-10


def test_without_a_cache(model) -> None:
    ids = tokens(1, 11)
    expected, logits = greedy(model, SKIPPED, ids, 4)
    with sp.prune(model, METHOD):
        sequences, ours = generate(model, ids, 4, use_cache=False)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


def test_inputs_embeds(llama) -> None:
    ids = tokens(2, 11)
    expected, logits = greedy(llama, SKIPPED, ids, 4)
    with sp.prune(llama, METHOD), torch.no_grad():
        embeddings = llama.get_input_embeddings()(ids)
        from helpers import exact_logits

        with exact_logits(llama) as steps:
            sequences = llama.generate(inputs_embeds=embeddings, max_new_tokens=4, do_sample=False)
    assert torch.equal(sequences, expected[:, 11:])
    assert close(torch.stack(steps, dim=1), logits) < 1e-10


def test_beams_are_scored_by_the_pruned_model(llama) -> None:
    """Every beam's score is the oracle's log-probability of its tokens."""
    ids = tokens(1, 11)
    with sp.prune(llama, METHOD):
        out = llama.generate(
            ids,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=5,
            do_sample=False,
            length_penalty=0.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    for sequence, score in zip(out.sequences, out.sequences_scores, strict=True):
        logits = gated_logits(llama, SKIPPED, 10, input_ids=sequence[None])[0, 10:-1]
        log_probabilities = torch.log_softmax(logits, -1).gather(-1, sequence[11:, None])
        assert abs(log_probabilities.sum().item() - score.item()) < 1e-4  # generate() scores in float32


def test_return_sequences_share_the_prompt(llama) -> None:
    ids = tokens(2, 11)
    torch.manual_seed(0)
    with sp.prune(llama, METHOD):
        out = llama.generate(
            ids,
            do_sample=True,
            num_return_sequences=3,
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_logits=True,
        )
    _, logits = greedy(llama, SKIPPED, ids.repeat_interleave(3, 0), 1)
    assert close(out.logits[0], logits[:, 0].float()) < 1e-6


@pytest.mark.parametrize("kind", ["assistant", "prompt lookup"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_speculation_verifies_in_the_decode_stage(kind: str, attn: str) -> None:
    model = BY_NAME["llama"].build(attn=attn)
    ids = tokens(1, 6).repeat(1, 3)  # repetitive, so that look-up finds candidates
    expected, _ = greedy(model, SKIPPED, ids, 12)
    assistant = BY_NAME["llama"].build(attn=attn, seed=0)
    options = dict(assistant_model=assistant) if kind == "assistant" else dict(prompt_lookup_num_tokens=4)
    prefills = []
    with sp.prune(model, METHOD) as handle:
        tracker = handle._tracker
        hook = model.model.layers[0].register_forward_hook(
            lambda module, args, output: prefills.append((tracker.current.prefill, output.shape[1]))
        )
        sequences = model.generate(ids, do_sample=False, max_new_tokens=12, **options)
        hook.remove()
    assert torch.equal(sequences, expected)
    assert prefills[0][0] == ids.shape[1] - 1
    assert all(prefill == 0 for prefill, _ in prefills[1:])
    assert any(length > 1 for _, length in prefills[1:]), "nothing was verified in bulk: the test tests nothing"


def test_a_pruned_assistant_keeps_its_own_stages(llama) -> None:
    assistant = BY_NAME["llama"].build(seed=3)
    ids = tokens(1, 12)
    expected, _ = greedy(llama, SKIPPED, ids, 8)
    with sp.prune(llama, METHOD), sp.prune(assistant, METHOD):
        sequences = llama.generate(ids, do_sample=False, max_new_tokens=8, assistant_model=assistant)
    assert torch.equal(sequences, expected)


def test_generate_called_while_generating(llama) -> None:
    """A logits processor that itself calls generate() must not disturb the outer stages."""
    ids, other = tokens(1, 9), tokens(1, 5, seed=4)
    expected, _ = greedy(llama, SKIPPED, ids, 4)

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        llama.generate(other, max_new_tokens=2, do_sample=False)
        return scores

    with sp.prune(llama, METHOD):
        sequences = llama.generate(ids, max_new_tokens=4, do_sample=False, logits_processor=[processor])
    assert torch.equal(sequences, expected)


# -- forward() outside generate() ---


@torch.no_grad()
def test_a_plain_forward_is_dense(llama) -> None:
    ids = tokens(2, 9)
    dense = llama(ids).logits
    with sp.prune(llama, METHOD) as handle:
        assert torch.equal(llama(ids).logits, dense)
        with handle.dense():
            assert torch.equal(llama.generate(ids, max_new_tokens=1), llama.generate(ids, max_new_tokens=1))
            with handle.stage(prefill=5):
                assert torch.equal(llama(ids).logits, dense)


@torch.no_grad()
def test_dense_block_makes_generate_dense(llama) -> None:
    ids = tokens(2, 9)
    _, dense = generate(llama, ids, 3)
    with sp.prune(llama, METHOD) as handle:
        with handle.dense():
            _, ours = generate(llama, ids, 3)
        _, pruned = generate(llama, ids, 3)
    assert torch.equal(ours, dense)
    assert not torch.equal(pruned, dense)


@torch.no_grad()
def test_a_chunk_of_context_has_no_logits(llama) -> None:
    ids = tokens(1, 12)
    cache = DynamicCache(config=llama.config)
    with sp.prune(llama, METHOD) as handle:
        with handle.stage(prefill=8):
            assert llama(ids[:, :8], **{CACHE: cache}).logits.shape[1] == 0
        with handle.stage(prefill=2):
            ours = llama(ids[:, 8:], logits_to_keep=2, **{CACHE: cache}).logits
    assert close(ours, gated_logits(llama, SKIPPED, 10, input_ids=ids)[:, -2:]) < 1e-10


@pytest.mark.parametrize(
    "keep", [0, 5, 9, torch.tensor([3]), torch.tensor([-1, -7]), torch.ones(1, 9, dtype=torch.bool)]
)
def test_logits_of_pruned_positions_are_an_error(llama, keep) -> None:
    with (
        sp.prune(llama, METHOD) as handle,
        handle.stage(prefill=5),
        pytest.raises(sp.StageError, match="logits"),
    ):
        llama(tokens(1, 9), logits_to_keep=keep)


def test_a_loss_over_pruned_positions_is_an_error(llama) -> None:
    ids = tokens(1, 9)
    with sp.prune(llama, METHOD) as handle, handle.stage(prefill=5), pytest.raises(sp.StageError, match="labels"):
        llama(ids, labels=ids)


@torch.no_grad()
def test_logits_at_chosen_decode_positions(llama) -> None:
    ids = tokens(1, 9)
    reference = gated_logits(llama, SKIPPED, 5, input_ids=ids)
    with sp.prune(llama, METHOD) as handle, handle.stage(prefill=5):
        ours = llama(ids, logits_to_keep=torch.tensor([5, -1])).logits
    assert close(ours, reference[:, [5, 8]]) < 1e-10


@pytest.mark.parametrize("prefill", [-1, 1.0, True, None, "3"])
def test_a_wrong_count_of_positions_is_an_error(llama, prefill) -> None:
    with (
        sp.prune(llama, METHOD) as handle,
        pytest.raises(sp.StageError, match="non-negative integer"),
        handle.stage(prefill=prefill),
    ):
        pass


def test_more_context_than_positions_is_an_error(llama) -> None:
    with sp.prune(llama, METHOD) as handle, handle.stage(prefill=10), pytest.raises(sp.StageError, match="only 9"):
        llama(tokens(1, 9))


def test_an_error_inside_a_forward_leaves_no_stage_behind(llama) -> None:
    ids = tokens(1, 9)
    dense = llama(ids).logits
    with sp.prune(llama, METHOD) as handle:
        with pytest.raises(sp.StageError), handle.stage(prefill=4):
            llama(ids)
        with pytest.raises(Exception, match=r"attention_mask|size|shape"):
            llama.generate(ids, attention_mask=torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
        assert torch.equal(llama(ids).logits, dense)


@pytest.mark.parametrize("length", [0, 257])
def test_empty_and_overlong_prompts_are_errors(llama, length: int) -> None:
    with sp.prune(llama, METHOD), pytest.raises(sp.PromptError, match=r"empty|256"):
        llama.generate(torch.ones(1, length, dtype=torch.long), max_new_tokens=1)


def test_continuous_batching_is_refused(llama) -> None:
    with sp.prune(llama, METHOD), pytest.raises(sp.StageError, match="continuous batching"):
        llama.generate_batch([[1, 2, 3]])


def test_where_a_prompt_ends() -> None:
    ids = tokens(2, 7)
    assert prompt_length(ids) == prompt_length(inputs=ids) == prompt_length(input_ids=ids) == 7
    assert prompt_length() == 1
    assert prompt_length(inputs_embeds=torch.zeros(1, 5, 3)) == 5


# -- properties ---


@settings(max_examples=40)
@given(data=st.data())
def test_any_prompt_chunks_layers_and_padding(llama, gemma3, data) -> None:
    model = data.draw(st.sampled_from([llama, gemma3]))
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=3))
    layers = data.draw(st.sets(st.integers(0, 5), min_size=1).map(sorted))
    ids, mask = left_padded(lengths, seed=data.draw(st.integers(0, 100)))
    chunk = data.draw(st.one_of(st.none(), st.integers(1, ids.shape[1] + 1)))
    _, logits = greedy(model, layers, ids, 2, attention_mask=mask)
    with sp.prune(model, sp.PrefillOnlyPruning(layers=layers)):
        _, ours = generate(model, ids, 2, attention_mask=mask, prefill_chunk_size=chunk)
    assert close(ours, logits) < 1e-10


@settings(max_examples=40)
@given(data=st.data())
@torch.no_grad()
def test_any_split_into_forward_calls(llama, gemma3, data) -> None:
    """Context in chunks, then decode rows in groups, through forward() by hand."""
    model = data.draw(st.sampled_from([llama, gemma3]))
    context = data.draw(st.integers(1, 14))
    decode = data.draw(st.integers(1, 6))
    layers = data.draw(st.sets(st.integers(0, 5), min_size=1).map(sorted))
    ids = tokens(1, context + decode, seed=data.draw(st.integers(0, 100)))
    cuts = sorted(data.draw(st.sets(st.integers(1, context + decode - 1), max_size=4)))
    reference = gated_logits(model, layers, context, input_ids=ids)[:, context:]
    cache, rows = DynamicCache(config=model.config), []
    with sp.prune(model, sp.PrefillOnlyPruning(layers=layers)) as handle:
        for start, stop in zip([0, *cuts], [*cuts, context + decode], strict=True):
            prefill = max(0, min(stop, context) - start)
            keep = (stop - start - prefill) if prefill else 0
            with handle.stage(prefill=prefill):
                rows.append(model(ids[:, start:stop], logits_to_keep=keep, **{CACHE: cache}).logits)
    assert close(torch.cat(rows, dim=1), reference) < 1e-10
