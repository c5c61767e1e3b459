"""The built-in text, and the bookkeeping of measurements (never their absolute values)."""

from __future__ import annotations

import pytest
import torch

import stageprune as sp
from helpers import tokens
from stageprune.evaluate.agreement import equal_share, first_difference, teacher_forced_agreement
from stageprune.evaluate.clock import TimedAnswer
from stageprune.evaluate.memory import peak_bytes
from stageprune.evaluate.speed import alternate, decode_speed, prefill_speed
from stageprune.evaluate.spread import Spread
from stageprune.evaluate.text import calibration_text, held_out_text, prompt_of
from zoo import BY_NAME


@pytest.fixture(scope="module")
def model():
    return BY_NAME["llama"].build(torch.float32, "sdpa")


def test_held_out_text_shares_no_paragraph_with_calibration_text() -> None:
    calibration, held_out = (set(text.split("\n\n")) for text in (calibration_text(), held_out_text()))
    assert not calibration & held_out
    assert len(calibration_text()) > 3 * len(held_out_text()) > 60_000
    assert calibration_text() == calibration_text()


@pytest.mark.parametrize("question", [None, "What is this?"])
@pytest.mark.parametrize("length", [64, 1000, 20_000])
def test_prompts_have_exactly_the_length(demo, question, length: int) -> None:
    prompt = prompt_of(demo.tokenizer, length, question)
    assert len(prompt) == length
    assert prompt != prompt_of(demo.tokenizer, length, question, start=50)
    text = demo.tokenizer.decode(prompt)
    assert (question or "") in text


@pytest.mark.parametrize("length", [0, -1, 2.5, True, None, "9"])
def test_wrong_lengths(demo, length) -> None:
    with pytest.raises(sp.PromptError, match="positive number of tokens"):
        prompt_of(demo.tokenizer, length)


def test_turns_alternate_and_both_kinds_are_real(model) -> None:
    seen = []
    with sp.prune(model, sp.PrefillOnlyPruning(0.5)) as handle:
        hook = model.model.layers[5].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
        pairs = alternate(handle, tokens(1, 20), new_tokens=3, pairs=2)
        hook.remove()
        speed, decode = prefill_speed(handle, 20, pairs), decode_speed(handle, 20, pairs)
        assert speed.ideal_speedup == handle.report(20).ideal_speedup
    prompts = [rows for index, rows in enumerate(seen) if index % 3 == 0]
    assert sorted(prompts) == [1, 1, 20, 20], "two dense prompts through the last layer, two pruned ones"
    assert prompts[0] != prompts[1]
    assert speed.achieved == pytest.approx(speed.speedup.median / speed.ideal_speedup)
    assert decode is not None


def test_spread() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 5.0, 4.0])
    assert spread.median == 3
    assert spread.to_dict()["median"] == 3


def test_peak_memory_of_a_pruned_prompt_is_not_higher(model) -> None:
    ids = tokens(1, 200)
    with sp.prune(model, sp.PrefillOnlyPruning(0.5)) as handle:

        def run() -> None:
            model.generate(ids, max_new_tokens=1, do_sample=False)

        pruned = peak_bytes(run, torch.device("cpu"))
        with handle.dense():
            dense = peak_bytes(run, torch.device("cpu"))
    assert 0 < pruned <= dense


def test_agreement_by_hand(model) -> None:
    assert equal_share([1, 2, 3], [1, 9, 3, 4]) == 0.5
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None
    ids = tokens(1, 12)
    with sp.prune(model, sp.PrefillOnlyPruning(0)) as handle:
        answer = model.generate(ids, max_new_tokens=5, do_sample=False)[:, 12:]
        assert teacher_forced_agreement(handle, ids, answer) == 1
        assert teacher_forced_agreement(handle, ids, (answer + 1) % 60) < 1


def test_the_typical_pair_is_the_one_with_the_median_speedup(model) -> None:
    def turn(*seconds: float) -> TimedAnswer:
        return TimedAnswer(torch.zeros(2, len(seconds), dtype=torch.long), seconds)

    pairs = [(turn(4.0, 4.5), turn(2.0, 2.5)), (turn(30.0, 31), turn(10.0, 10.5)), (turn(3.0, 4), turn(3.0, 3.5))]
    with sp.prune(model, sp.PrefillOnlyPruning(0.5)) as handle:
        speed = prefill_speed(handle, 20, pairs)
        decode = decode_speed(handle, 20, pairs)
        assert decode_speed(handle, 20, [(turn(1.0), turn(1.0, 2.0))]) is None
    assert speed.speedup.median == 2
    assert speed.typical_s == (4, 2)
    assert speed.to_dict()["typical_s"] == {"dense": 4, "pruned": 2}
    assert decode is not None
    assert decode.dense_tokens_per_s.median == 2, "two rows, a second each"
    assert decode.speedup.median == 2
    assert decode.typical_tokens_per_s[1] == 2 * decode.typical_tokens_per_s[0]
    assert decode.ideal_speedup == 1
    assert decode.preparation_steps is None, "no channels are pruned"
    assert decode.break_even_tokens == 0, "the first token is not later"


def test_break_even_is_the_later_first_token_over_what_a_token_wins(model) -> None:
    def turn(*seconds: float) -> TimedAnswer:
        return TimedAnswer(torch.zeros(1, len(seconds), dtype=torch.long), seconds)

    late = [(turn(1.0, 2.0), turn(3.0, 3.5)), (turn(1.0, 2.0), turn(5.0, 5.5))]
    slow = [(turn(1.0, 2.0), turn(1.0, 3.0))]
    with sp.prune(model, sp.OnlineChannelPruning(mlp_ratio=0.5)) as handle:
        speed, never = decode_speed(handle, 20, late), decode_speed(handle, 20, slow)
        assert speed is not None
        assert never is not None
        assert speed.break_even_tokens == 3 / 0.5
        assert never.break_even_tokens is None
        assert speed.preparation_steps is None, "there was no prompt yet"
        model.generate(tokens(1, 9), max_new_tokens=2, do_sample=False)
        again = decode_speed(handle, 20, late)
        assert again is not None
        assert again.preparation_steps is not None
        assert again.preparation_steps > 0
        report = handle.report(20 + 2 // 2)
        assert again.ideal_speedup == report.ideal_decode_speedup > 1


def test_patience_ends_long_measurements(model) -> None:
    with sp.prune(model, sp.PrefillOnlyPruning(0.5)) as handle:
        assert len(alternate(handle, tokens(1, 9), pairs=8, patience=0)) == 3
        assert len(alternate(handle, tokens(1, 9), pairs=1, patience=0)) == 1
        assert len(alternate(handle, tokens(1, 9), pairs=1, seconds=60)) == 10


def test_a_wide_spread_says_that_the_machine_is_busy() -> None:
    assert Spread.of([1.0, 1.0, 2.0, 2.0]).is_wide
    assert not Spread.of([1.0, 1.01, 0.99]).is_wide
    assert not Spread.of([1.0]).is_wide
