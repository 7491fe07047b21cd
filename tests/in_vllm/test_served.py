"""`vllm serve` with our drafter in float32 answers many requests at once, and each field."""

import inspect
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pair
import pytest
from openai.resources import chat, completions
from support import DRAFTS, options_of, replay_of
from test_in_vllm import TOKENS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

PROMPTS = pair.prompts(16, 21)
START = WAIT = 1800  # seconds: a busy machine needs many


def character_tokenizer():
    """A tokenizer with one character an id; ASCII characters write JSON, and the first id ends a text."""
    characters = {chr(k if 32 <= k < 127 else 0x4E00 + k): k for k in range(1, pair.VOCAB)}
    found = Tokenizer(models.WordLevel(characters | {"<end>": 0}, "<end>"))
    found.pre_tokenizer, found.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    template = "{{ messages[0]['content'] }}"
    ends = {"unk_token": "<end>", "eos_token": "<end>", "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=found, **ends)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a running server; a failed start shows the log."""
    folder = tmp_path_factory.mktemp("served")
    character_tokenizer().save_pretrained(folder)
    log = folder / "log.txt"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = options_of("tied")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options["model"]]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256"]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--block-size", "16"]
    command += ["--num-gpu-blocks-override", "64", "--served-model-name", "pair"]
    command += ["--speculative-config", json.dumps(options["speculative_config"])]
    command += ["--tokenizer", str(folder)]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--trust-request-chat-template"]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + START
    try:
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
            try:
                if httpx.get(f"{address}/health", timeout=60).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        yield address
    finally:
        server.terminate()
        server.wait(300)


def ask(address, prompt, stream, tokens=TOKENS, leave_after=None):
    """The ids of an answer. ``leave_after``: the number of a stream's parts after which the client leaves."""
    asked = {"model": "pair", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    asked |= {"ignore_eos": True, "return_token_ids": True, "stream": stream}
    if not stream:
        reply = httpx.post(f"{address}/v1/completions", json=asked, timeout=WAIT).json()
        return reply["choices"][0]["token_ids"]
    found, parts = [], 0
    with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=WAIT) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                parts += 1
                for choice in json.loads(line[6:])["choices"]:
                    found += choice["token_ids"] or []
            if parts == leave_after:
                break
    return found


def metric(address, name):
    """The sum of a counter or gauge of the server."""
    lines = httpx.get(f"{address}/metrics", timeout=WAIT).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}"))


def test_sixteen_requests_at_once(address):
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda at: ask(address, PROMPTS[at], at % 2 == 0), range(16)))
    for prompt, text in zip(PROMPTS, found, strict=True):
        assert len(text) == TOKENS
        assert replay_of("tied").says_greedily(prompt, text, 1e-3)
    counted = {
        name: metric(address, f"spec_decode_num_{name}")
        for name in ("drafts_total", "draft_tokens_total", "accepted_tokens_total")
    }
    assert 0 < counted["draft_tokens_total"] <= DRAFTS * counted["drafts_total"]
    assert counted["accepted_tokens_total"] > 0.2 * counted["drafts_total"]


def test_requests_that_leave_and_requests_that_are_preempted_change_no_text(address):
    """Sixteen leave after a few tokens; eight need more pages than there are. No page stays taken."""
    before = metric(address, "num_preemptions_total")
    longer = [(prompt * 90)[:90] for prompt in pair.prompts(8, 23)]
    with ThreadPoolExecutor(24) as pool:
        left = [pool.submit(ask, address, PROMPTS[at], True, 150, 1 + at % 4) for at in range(16)]
        found = list(pool.map(lambda prompt: ask(address, prompt, True, 110), longer))
    assert all(0 < len(future.result()) < 150 for future in left)
    for prompt, text in zip(longer, found, strict=True):
        assert len(text) == 110 and replay_of("tied").says_greedily(prompt, text, 1e-3)
    assert metric(address, "num_preemptions_total") > before
    assert replay_of("tied").says_greedily(PROMPTS[0], ask(address, PROMPTS[0], False), 1e-3)
    end = time.monotonic() + 60
    while metric(address, "num_requests_running") or metric(address, "kv_cache_usage_perc"):
        assert time.monotonic() < end
        time.sleep(1)


SOME = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SOME}}
BOTH = [
    {"frequency_penalty": 1.0}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3},
    {"length_penalty": 2.0}, {"logit_bias": {"7": 5}}, {"min_p": 0.1}, {"seed": 7},
    {"temperature": 0.7, "seed": 0}, {"n": 2, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"n": 2},
    {"temperature": 1e-6}, {"temperature": 2.0, "top_p": 1e-6},
    {"use_beam_search": True, "n": 2, "temperature": 0}, {"stop": ["c"], "include_stop_str_in_output": True},
    {"stop_token_ids": [3]}, {"ignore_eos": True, "min_tokens": 3}, {"max_tokens": 0},
    {"stream": True, "stream_options": {"include_usage": True}}, {"stream_interval": 2},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"truncate_prompt_tokens": 2, "truncation_side": "left"}, {"add_special_tokens": False},
    {"allowed_token_ids": [1, 2, 3]}, {"bad_words": ["e"]}, {"prompt_logprobs": 1}, {"prompt_logprobs": 0},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": SOME}}},
    {"structured_outputs": {"regex": "[a-f]+"}, "temperature": 0.6, "top_p": 0.95},
    {"structured_outputs": {"choice": ["cab", "bed"]}}, {"structured_outputs": {"regex": "("}},
    {"priority": 1}, {"request_id": "mine", "session_id": "mine", "user": "me", "cache_salt": "salt"},
    {"return_tokens_as_token_ids": True, "return_token_ids": True, "return_token_offsets": True},
    {"return_mm_kwargs": True, "routed_experts_prompt_start": 1},
    {"kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}},
    {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}},
    {"thinking_token_budget": 3}, {"watermarking": True}, {"model": "another"},
]  # fmt: skip
COMPLETION = [
    {"prompt": [[1, 2], [3, 4]]}, {"prompt": [pair.VOCAB]}, {"prompt_embeds": "AAAA"}, {"suffix": "de"},
    {"best_of": 3}, {"logprobs": 0}, {"logprobs": 3, "temperature": 0.7},
    {"logprobs": 2, "logprob_token_ids": [1, 2]}, {"logprobs": -1}, {"echo": True},
    {"echo": True, "max_tokens": 0}, {"echo": True, "logprobs": 1},
]  # fmt: skip
CHAT = [
    {"messages": []}, {"max_completion_tokens": 5}, {"logprobs": True}, {"logprobs": True, "stream": True},
    {"logprobs": True, "top_logprobs": 3}, {"logprobs": True, "logprob_token_ids": [1, 2]},
    {"logprobs": True, "echo": True}, {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"functions": [TOOL["function"]], "function_call": "auto"},
    {"reasoning_effort": "low", "include_reasoning": False, "verbosity": "low"},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"chat_template": "de", "chat_template_kwargs": {"a": 1}, "documents": [{"text": "de"}]},
    {"media_io_kwargs": {"image": {}}}, {"mm_processor_kwargs": {"a": 1}}, {"return_prompt_text": True},
    {"audio": {"voice": "a", "format": "wav"}, "modalities": ["text", "audio"]},
    {"prediction": {"type": "content", "content": "de"}, "web_search_options": {}, "moderation": {}},
    {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "me"},
    {"prompt_cache_key": "a", "prompt_cache_options": {}, "prompt_cache_retention": "24h"},
]  # fmt: skip
CALLS = {
    "completions": (COMPLETION, {"prompt": "abc"}, CompletionRequest, completions.Completions),
    "chat/completions": (
        CHAT,
        {"messages": [{"role": "user", "content": "abc"}]},
        ChatCompletionRequest,
        chat.Completions,
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_field_is_answered_or_refused_beside_a_greedy_request(address, call):
    """No field of the `openai` client's two calls, nor of vLLM's own, changes a text or ends the engine."""
    own, bare, model, client = CALLS[call]
    fields = {*model.model_fields, *inspect.signature(client.create).parameters}
    told = {field for asked in (*BOTH, *own) for field in asked}
    assert fields - told <= {"self", "extra_headers", "extra_query", "extra_body", "timeout"}

    def post(asked):
        body = {"model": "pair", "max_tokens": 6, "temperature": 0} | bare | asked
        return httpx.post(f"{address}/v1/{call}", json=body, timeout=WAIT)

    with ThreadPoolExecutor(7) as pool:
        for at in range(0, len(BOTH + own), 6):
            group, prompt = (BOTH + own)[at : at + 6], PROMPTS[at % 16]
            greedy = pool.submit(ask, address, prompt, False)
            for asked, reply in zip(group, pool.map(post, group), strict=True):
                assert 200 <= reply.status_code < 500 and "InternalServerError" not in reply.text, (
                    asked,
                    reply.text,
                )
            assert replay_of("tied").says_greedily(prompt, greedy.result(), 1e-3), group
    assert httpx.get(f"{address}/health", timeout=WAIT).status_code == 200
