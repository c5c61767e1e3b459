"""What the official client gets."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import openai
import pytest
import torch

import stageprune as sp
from serving_support import Running, chat_tokens, expected, running, serving, text_of

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a t a b c"}]
PROMPT = "a t a b c d e f"
NEW = 40


def test_greedy_chat_is_the_librarys(served: Running) -> None:
    prompt = chat_tokens(served, MESSAGES)
    text = text_of(served, expected(served, prompt, NEW))
    with served.client() as client:
        options = dict(model="tiny", messages=MESSAGES, temperature=0)
        whole = client.chat.completions.create(**options, max_tokens=NEW)
        chunks = list(client.chat.completions.create(**options, max_completion_tokens=NEW, stream=True))
    choice = whole.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), NEW)
    assert whole.usage.total_tokens == len(prompt) + NEW
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > NEW / 2, "token by token"
    assert all(chunk.usage is None for chunk in chunks)


def test_greedy_completion_is_the_librarys(served: Running) -> None:
    prompt = served.loaded.tokenizer(PROMPT).input_ids
    text = text_of(served, expected(served, prompt, NEW))
    with served.client() as client:
        options = dict(model="tiny", max_tokens=NEW, temperature=0)
        whole = client.completions.create(prompt=PROMPT, **options)
        chunks = list(
            client.completions.create(prompt=prompt, **options, stream=True, stream_options={"include_usage": True})
        )
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "length")
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == NEW


def test_pruning_is_in_force(served: Running, tiny_folder: Path) -> None:
    """The dense model answers otherwise, so the tests above can tell."""
    prompt = served.loaded.tokenizer(PROMPT).input_ids
    dense = sp.load(str(tiny_folder), dtype="float32").model
    answer = dense.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
    assert answer.tolist() != expected(served, prompt, NEW)


def test_several_prompts_and_answers(served: Running) -> None:
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    texts = [text_of(served, expected(served, prompt, 6)) for prompt in prompts]
    with served.client() as client:
        whole = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=6, temperature=0)
        chunks = list(client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0, stream=True))
        words = client.completions.create(model="tiny", prompt=["a b", "c"], max_tokens=1)
    assert [choice.text for choice in whole.choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 24)
    for index, text in enumerate(texts):
        assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == index) == text
    assert len(words.choices) == 2


def test_without_a_number_of_tokens(served: Running) -> None:
    """A completion has 16; a chat what the context leaves."""
    with served.client() as client:
        assert client.completions.create(model="tiny", prompt="a").usage.completion_tokens == 16
        usage = client.chat.completions.create(model="tiny", messages=MESSAGES).usage
    assert usage.total_tokens == served.service.limits.max_model_len


def test_sampling_follows_the_seed(served: Running) -> None:
    def sample(seed: int | None, **options: float) -> str:
        answer = client.completions.create(model="tiny", prompt="a b", max_tokens=24, seed=seed, **options)
        return answer.choices[0].text

    with served.client() as client:
        assert sample(1) == sample(1) != sample(2)
        assert sample(None) != sample(None)
        assert sample(1, temperature=0) == sample(2, temperature=0)
        assert sample(1, top_p=1e-9) == sample(2, temperature=0), "only the likeliest token is left"
        two = client.completions.create(model="tiny", prompt="a b", max_tokens=24, seed=1, n=2)
    assert two.choices[0].text == sample_again(served) != two.choices[1].text


def sample_again(served: Running) -> str:
    """Seed 1, as the library samples."""
    ids = torch.tensor([served.loaded.tokenizer("a b").input_ids])
    torch.manual_seed(1)
    out = served.loaded.model.generate(ids, max_new_tokens=24, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    return text_of(served, out[0, ids.shape[1] :].tolist())


def test_stop_strings_end_the_answer(served: Running) -> None:
    prompt = served.loaded.tokenizer(PROMPT).input_ids
    tokens = expected(served, prompt, NEW)
    text = text_of(served, tokens)
    stop = text[12:14]
    start = text.find(stop)
    needed = next(n for n in range(NEW + 1) if stop in text_of(served, tokens[:n]))
    with served.client() as client:
        options = dict(model="tiny", prompt=PROMPT, max_tokens=NEW, temperature=0)
        whole = client.completions.create(**options, stop=stop)
        listed = client.completions.create(**options, stop=["never there", stop])
        chunks = list(client.completions.create(**options, stop=stop, stream=True))
        missed = client.completions.create(**options, stop="never there")
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text[:start], "stop")
    assert needed <= whole.usage.completion_tokens <= needed + 3, "bytes of a character may be held back"
    assert listed.choices[0].text == text[:start]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[:start]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (missed.choices[0].text, missed.choices[0].finish_reason) == (text, "length")


def test_the_models_own_end(served: Running, tiny_folder: Path) -> None:
    prompt = served.loaded.tokenizer(PROMPT).input_ids
    tokens = expected(served, prompt, NEW)
    end = tokens[9]
    cut = tokens.index(end)
    with running(tiny_folder, end=end) as run, run.client() as client:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=NEW, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text_of(served, tokens[:cut]), "stop")
    assert answer.usage.completion_tokens == cut + 1


def logprobs_of(served: Running, prompt: list[int], new_tokens: int) -> torch.Tensor:
    """Of each step of the greedy answer, `[new_tokens, vocabulary]`."""
    out = served.loaded.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.log_softmax(torch.cat(out.logits).double(), -1)


def test_logprobs_of_a_completion(served: Running) -> None:
    prompt = served.loaded.tokenizer(PROMPT).input_ids
    reference = logprobs_of(served, prompt, 8)
    tokens = expected(served, prompt, 8)
    with served.client() as client:
        options = dict(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
        found = client.completions.create(**options, logprobs=3).choices[0].logprobs
        chunks = list(client.completions.create(**options, logprobs=3, stream=True))
        none = client.completions.create(**options, logprobs=0).choices[0].logprobs
    values = [reference[step, token].item() for step, token in enumerate(tokens)]
    assert found.token_logprobs == pytest.approx(values, abs=1e-5)
    for step, top in enumerate(found.top_logprobs):
        assert list(top.values()) == pytest.approx(reference[step].topk(3).values.tolist(), abs=1e-5)
        assert max(top.values()) == found.token_logprobs[step], "greedy"
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [sum(lengths[:step]) for step in range(8)]
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in streamed for token in part.tokens] == found.tokens
    assert [offset for part in streamed for offset in part.text_offset] == found.text_offset
    assert none.token_logprobs == found.token_logprobs
    assert none.top_logprobs == [{}] * 8


def test_logprobs_of_a_chat(served: Running) -> None:
    prompt = chat_tokens(served, MESSAGES)
    reference = logprobs_of(served, prompt, 8)
    with served.client() as client:
        options = dict(model="tiny", messages=MESSAGES, max_tokens=8, logprobs=True)
        greedy = client.chat.completions.create(**options, top_logprobs=2, temperature=0).choices[0].logprobs.content
        chunks = list(client.chat.completions.create(**options, temperature=0, stream=True))
        hot = client.chat.completions.create(**options, top_logprobs=2, temperature=2, seed=3).choices[0].logprobs
    assert len(greedy) == 8
    for step, token in enumerate(greedy):
        top = reference[step].topk(2).values.tolist()
        assert [other.logprob for other in token.top_logprobs] == pytest.approx(top, abs=1e-5)
        assert token.logprob == token.top_logprobs[0].logprob
        assert token.bytes is None or bytes(token.bytes).decode() == token.token
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.logprob for entry in streamed] == [token.logprob for token in greedy]
    first = [other.logprob for other in hot.content[0].top_logprobs]
    assert first == pytest.approx(reference[0].topk(2).values.tolist(), abs=1e-5), "before the temperature"
    assert all(math.isfinite(token.logprob) for token in hot.content)


def test_models(served: Running) -> None:
    with served.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other/model")


def test_the_asynchronous_client_with_many_at_once(served: Running) -> None:
    """Each of many concurrent requests of both kinds gets its own answer."""
    prompts = [f"{'abc'[i % 3]} {i}" for i in range(24)]
    tokens = [served.loaded.tokenizer(prompt).input_ids for prompt in prompts]
    texts = [text_of(served, expected(served, one, 5 + i % 7)) for i, one in enumerate(tokens)]

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        options = dict(model="tiny", prompt=prompts[i], max_tokens=5 + i % 7, temperature=0)
        if i % 2:
            return (await client.completions.create(**options)).choices[0].text
        stream = await client.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(len(prompts))))

    assert asyncio.run(ask_all()) == texts


def test_parameters_that_do_nothing_are_accepted(served: Running) -> None:
    """Many clients send them with every request."""
    neutral = dict(
        presence_penalty=0, frequency_penalty=0.0, logit_bias={}, user="me", response_format={"type": "text"}
    )
    with served.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, **neutral)
    assert answer.usage.completion_tokens == 2


def test_demo_model_chats(demo) -> None:
    """A real tokenizer and chat template."""
    messages = [{"role": "user", "content": "Say hello to Zoë — in one word. 🙂"}]
    with sp.prune(demo.model, sp.PrefillOnlyPruning(1 / 3)), serving(demo) as run, run.client() as client:
        text = text_of(run, expected(run, chat_tokens(run, messages), 12))
        options = dict(model="tiny", messages=messages, max_tokens=12, temperature=0)
        assert client.chat.completions.create(**options).choices[0].message.content == text
        chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
