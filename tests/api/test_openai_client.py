"""The official client, sync and async, streaming and not, against a real socket."""

import asyncio

import openai
import pytest


@pytest.fixture
def client(site):
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(**more):
    return {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **more}


def test_whole_answer(client, site, tokenizer):
    answer = client.chat.completions.create(**ask(temperature=0, seed=7, top_p=0.9, max_tokens=50))
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    turn = site.engine.turns[0]
    assert turn.tokens.tolist() == tokenizer.encode(prompt)
    assert (turn.sampling.seed, turn.sampling.temperature, turn.sampling.top_p, turn.sampling.max_tokens) == (
        7,
        0,
        0.9,
        50,
    )
    assert turn.sampling.stop_ids == {0, 2}
    assert turn.last_role == "user"
    assert answer.usage.prompt_tokens == len(turn.tokens)
    assert answer.usage.completion_tokens == len(tokenizer.encode("hello world"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert answer.tenuto["cached"] == {"device": 3, "host": 2}
    assert answer.tenuto["ttft_s"] > 0
    assert answer.id.startswith("chatcmpl-")


def test_max_completion_tokens_wins_and_length_is_reported(client, site):
    answer = client.chat.completions.create(**ask(max_completion_tokens=2, max_tokens=50))
    assert site.engine.turns[0].sampling.max_tokens == 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


def test_more_tokens_than_fit_are_clipped_to_the_context(client, site):
    client.chat.completions.create(**ask(max_tokens=32_000))
    turn = site.engine.turns[0]
    assert turn.sampling.max_tokens == 4096 - len(turn.tokens)


def test_stream_with_usage(client):
    stream = client.chat.completions.create(**ask(stream=True, stream_options={"include_usage": True}))
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 5
    assert chunks[-1].tenuto["session"] == "chain-1"
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_stream_without_usage_has_no_usage_chunk_but_the_cache_report(client):
    chunks = list(client.chat.completions.create(**ask(stream=True)))
    assert all(c.choices for c in chunks)
    assert chunks[-1].tenuto["cached"] == {"device": 3, "host": 2}


def test_completions(client, site, tokenizer):
    answer = client.completions.create(model="toy", prompt="abc", max_tokens=20)
    assert answer.choices[0].text == "hello world"
    assert site.engine.turns[0].tokens.tolist() == tokenizer.encode("abc")
    answer = client.completions.create(model="toy", prompt=[5, 6, 7], max_tokens=20)
    assert site.engine.turns[1].tokens.tolist() == [5, 6, 7]
    pieces = list(client.completions.create(model="toy", prompt="abc", stream=True))
    assert "".join(c.choices[0].text for c in pieces) == "hello world"
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_models(client):
    assert [m.id for m in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "tenuto"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_errors_reach_the_client_as_its_own_types(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**ask() | {"model": "llama-99"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask(n=2))
    assert refused.value.param == "n"
    assert refused.value.request_id.startswith("req_")


def test_many_async_streams_at_once(site):
    site.engine.step_s = 0.002

    async def one(client, number):
        stream = await client.chat.completions.create(**ask(stream=True, extra_body={"session_id": f"s{number}"}))
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    assert asyncio.run(all_of_them()) == ["hello world"] * 64
    assert {turn.session for turn in site.engine.turns} == {f"s{n}" for n in range(64)}
