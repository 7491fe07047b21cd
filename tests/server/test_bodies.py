"""Bodies: every field of the client is used, without effect, or refused by name; faults name their field."""

import time
from dataclasses import replace

import pytest
from support.served import ask, body_of, served

from torch_dflash.server import bodies
from torch_dflash.server.bodies import IDLE, REFUSED, USED, ChatBody, Refused, TextBody, check_body


@pytest.fixture(scope="module")
def app():
    return served()


def test_every_field_of_the_installed_client_stands_in_one_list():
    theirs = {*bodies.ChatParams.__annotations__, *bodies.TextParams.__annotations__}
    lists = USED, IDLE, {*REFUSED}
    assert theirs <= set.union(*lists)
    assert {*ChatBody.__annotations__, *TextBody.__annotations__} == set.union(*lists)
    assert sum(map(len, lists)) == len(set.union(*lists))


def test_each_idle_field_changes_nothing_and_each_refused_one_is_named(app):
    values = {name: "24h" if "retention" in name else "default" if "tier" in name else "x" for name in IDLE}
    values |= {"metadata": {"a": "b"}, "store": True, "prompt_cache_options": {}}
    plain, full = ask(app, body_of(), body_of(**values))
    assert plain.json()["choices"] == full.json()["choices"]
    for name, off in REFUSED.items():
        path, body = "/v1/chat/completions", body_of()
        if name not in ChatBody.__annotations__:
            path, body = "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2}
        refused, idle = ask(app, body | {name: 3}, body | {name: off}, path=path)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name, name
        assert idle.status_code == 200, (name, idle.text)


FAULTS = {
    "best_off": ({"best_off": 3}, "best_off"),
    "a type": ({"temperature": "hot"}, "temperature"),
    "a number as text": ({"temperature": "0.5"}, "temperature"),
    "a flag as a number": ({"n": True}, "n"),
    "no message": ({"messages": []}, "messages"),
    "no content": ({"messages": [{"role": "user"}]}, "messages"),
    "an unknown role": ({"messages": [{"role": "ghost", "content": "x"}]}, "messages.0.role"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.image_url",
    ),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
    "a template's refusal": ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    "no token": ({"max_tokens": 0}, "max_tokens"),
    "too many": ({"max_tokens": 1000}, "messages"),
    "below 0": ({"temperature": -1}, "temperature"),
    "beyond 1": ({"temperature": 1, "top_p": 3.0}, "top_p"),
    "beyond 1, greedy": ({"top_p": 3.0}, "top_p"),
    "a bias of another id": ({"logit_bias": {"999": 1}}, "logit_bias"),
    "a bias of no id": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "biases": ({"logit_bias": {str(token): 1 for token in range(40)}}, "logit_bias"),
    "an infinite penalty": ({"repetition_penalty": 0}, "repetition_penalty"),
    "more than are kept": ({"logprobs": True, "top_logprobs": 9}, "top_logprobs"),
    "top alone": ({"top_logprobs": 2}, "top_logprobs"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
        "response_format",
    ),
    "no choice": ({"n": 0}, "n"),
    "too many choices": ({"n": 200}, "n"),
    "an empty stop": ({"stop": ["a", ""]}, "stop"),
    "stop ids": ({"stop_token_ids": [*range(20)]}, "stop_token_ids"),
    "a huge stop id": ({"stop_token_ids": [2**70]}, "stop_token_ids"),
    "a seed": ({"seed": 2**70}, "seed"),
    "at least more than most": ({"min_tokens": 13}, "min_tokens"),
    "below no token": ({"min_tokens": -1}, "min_tokens"),
    "usage without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "tools without a parser": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a variable that is none": ({"chat_template_kwargs": {"tokenize": False}}, "messages"),
    "another's template": ({"chat_template_kwargs": {"chat_template": "x"}}, "messages"),
    "a cut prompt": ({"chat_template_kwargs": {"truncation": True, "max_length": 4}}, "messages"),
    "a bias beyond float32": ({"logit_bias": {"5": 1e39}}, "logit_bias"),
    "a bias below float32": ({"logit_bias": {"5": -1e39}}, "logit_bias"),
    "a presence beyond float32": ({"presence_penalty": 1e39}, "presence_penalty"),
    "a frequency below float32": ({"frequency_penalty": -1e308}, "frequency_penalty"),
    "a repetition beyond float32": ({"repetition_penalty": 1e308}, "repetition_penalty"),
    "a repetition of 0 in float32": ({"repetition_penalty": 1e-60}, "repetition_penalty"),
    "many stops": ({"stop": ["a"] * 65}, "stop"),
    "no end": ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    "another's tool": ({"tools": [{"type": "web_search"}]}, "tools.0.function"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_400_by_the_name_of_its_field(app, fault):
    fields, param = FAULTS[fault]
    (answer,) = ask(app, body_of() | fields) if fault != "half a character" else ask_raw(app)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param, error


def ask_raw(app):
    """A body that no encoder of JSON would write."""
    import asyncio

    from support.served import client

    async def one():
        data = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
        async with client(app, headers={"content-type": "application/json"}) as http:
            return [await http.post("/v1/chat/completions", content=data)]

    return asyncio.run(one())


TEXT_FAULTS = {
    "below an id": ({"prompt": [-1]}, "prompt"),
    "beyond the vocabulary": ({"prompt": [500]}, "prompt"),
    "many prompts": ({"prompt": ["a"] * 300}, "prompt"),
    "many choices": ({"prompt": ["a", "b", "c"], "n": 100}, "n"),
    "log-probabilities": ({"logprobs": 6}, "logprobs"),
    "no ids": ({"prompt": [1.5] * 300_000}, "prompt.0"),
    "no lists of ids": ({"prompt": [[True]] * 300_000}, "prompt.0.0"),
}


@pytest.mark.parametrize("fault", TEXT_FAULTS)
def test_a_fault_of_a_completion_is_told_at_once(app, fault):
    fields, param = TEXT_FAULTS[fault]
    begun = time.process_time()
    (answer,) = ask(app, {"model": "tiny", "prompt": "a", "max_tokens": 2} | fields, path="/v1/completions")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert time.process_time() - begun < 3


OPTION_OF = {
    "frequency_penalty": (0.5, "frequency_penalty"),
    "presence_penalty": (0.5, "presence_penalty"),
    "repetition_penalty": (1.5, "repetition_penalty"),
    "temperature": (0.5, "temperature"),
    "top_p": (0.5, "top_p"),
    "top_k": (5, "top_k"),
    "min_p": (0.5, "min_p"),
    "logit_bias": ({"5": 1}, "sequence_bias"),
    "min_tokens": (3, "min_new_tokens"),
    "max_tokens": (3, "max_new_tokens"),
    "max_completion_tokens": (3, "max_new_tokens"),
    "ignore_eos": (True, "eos_token_id"),
    "stop_token_ids": ([7], "eos_token_id"),
    "logprobs": (True, "output_logprobs"),
    "response_format": ({"type": "json_object"}, "grammar"),
}


@pytest.mark.parametrize("field", OPTION_OF)
def test_a_field_reaches_the_engine(app, field):
    model, (value, option) = app.state.server.model, OPTION_OF[field]
    some = {name: given for name, given in body_of().items() if name != "max_tokens"}
    without, told = (model.options(body, 4, None) for body in (some, some | {field: value}))
    assert told[option] != without.get(option)


def test_a_field_of_the_prompt_reaches_the_tokenizer(app):
    class Tokenizer:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [1, 5] if add_special_tokens else [5]}

    model = replace(app.state.server.model, tokenizer=Tokenizer())
    assert model.prompts({"prompt": "a"}) == [[1, 5]]
    assert model.prompts({"prompt": "a", "add_special_tokens": False}) == [[5]]


def test_too_long_a_prompt_has_openais_code(app):
    (answer,) = ask(app, body_of("x" * 300))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_part_that_was_left_out_is_named():
    app = served(engine={"processors": (), "outputs": (), "top_logprobs": 0, "filters": False})
    asked = {"presence_penalty": 1, "logit_bias": {"5": 1}, "min_tokens": 2, "logprobs": True, "top_p": 0.5}
    asked |= {"response_format": {"type": "json_object"}, "repetition_penalty": 1.2}
    found = ask(app, *(body_of(**{name: value}) for name, value in asked.items()))
    assert [one.json()["error"]["param"] for one in found] == [*asked]
    (plain,) = ask(app, body_of(presence_penalty=0, logit_bias={}, min_tokens=0, top_p=1))
    assert plain.status_code == 200


def test_messages_reach_the_template_as_it_reads_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    sent_back = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]}
    sent_back |= {"function_call": None, "annotations": None, "parsed": {"a": 1}, "thinking": "hm"}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    body = {"model": "m", "messages": [{"role": "developer", "content": "d"}, parts, sent_back]}
    found = [bodies._for_template(one) for one in check_body(ChatBody, body)["messages"]]
    assert found[0] == {"role": "system", "content": "d"} and found[1]["content"] == "a\nb"
    assert found[2]["thinking"] == "hm" and "parsed" not in found[2]
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert found[2]["content"] == "" and found[2].keys() == {"role", "content", "tool_calls", "thinking"}
    with pytest.raises(Refused, match="Input should be"):
        check_body(ChatBody, body | {"messages": [{"role": "user", "content": 3}]})
