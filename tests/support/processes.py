"""Decoding in other processes, for `tests/engine/test_processes.py`."""

import json
import multiprocessing
import os
import signal
import warnings

import torch

import torch_dflash as td
from support.tiny import make_target
from support.tokenizers import letters

IDS = torch.tensor([[3, 1, 4, 1, 5]])
ASKED = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def decode(told) -> None:
    """Sends a spawned worker's text with the default runtime."""
    told.send(td.generate(make_target("llama"), None, IDS, **ASKED).tolist())


def _said(call) -> str:
    try:
        return repr(call())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def in_a_fork(calls) -> dict[str, str]:
    """Results of ``calls`` in a forked child; a call that waits ends the child after 30 s."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's own warning of forks
        child = os.fork()
    if child == 0:
        for name, call in calls.items():
            signal.alarm(30)
            os.write(writer, (json.dumps([name, _said(call)]) + "\n").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        said = dict(map(json.loads, lines))
    os.waitpid(child, 0)
    return said


def main() -> None:
    target = make_target("llama")
    before = in_a_fork({"generate": lambda: _generate(target, runtime="eager")})  # JAX has not started

    import jax

    import jax_bridge as jb

    jax.devices()  # by the user's own code
    spawn = multiprocessing.get_context("spawn")
    reader, writer = spawn.Pipe(duplex=False)
    worker = spawn.Process(target=decode, args=(writer,))
    worker.start()
    xla, eager = (td.compile(target, None, runtime=name, max_length=32) for name in ("xla", "eager"))
    tokenizer = letters()[0]
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    block, session = td.dflash(None), xla.session()
    own = target.generate(IDS, attention_mask=torch.ones_like(IDS), **ASKED).tolist()
    forked = in_a_fork(
        {
            "generate": lambda: _generate(target),
            "stream": lambda: td.stream(target, None, IDS, **ASKED),
            "compile": lambda: td.compile(target, None),
            "mesh": lambda: td.compile(target, None, mesh="auto"),
            "replicas": lambda: _generate(target, mesh=2, replicas=2),
            "dflash": lambda: td.dflash(None),
            "custom_generate": lambda: target.generate(IDS, max_new_tokens=4, custom_generate=block),
            "Chat": lambda: td.Chat(xla, tokenizer),
            "load": lambda: jb.load("no such model"),
            "to_jax": lambda: jb.to_jax(IDS),
            "engine.generate": lambda: xla.generate(IDS, **ASKED),
            "engine.stream": lambda: xla.stream(IDS, **ASKED),
            "engine.start": lambda: xla.start(IDS, **ASKED),
            "engine.warmup": lambda: xla.warmup(progress=False),
            "session": lambda: next(session.gains(IDS[0].tolist(), **ASKED)),
            "eager": lambda: _generate(target, runtime="eager").tolist(),
            "eager engine": lambda: eager.generate(IDS, **ASKED).tolist(),
        }
    )
    spawned = reader.recv() if reader.poll(60) else None
    worker.join()
    print(json.dumps({"before": before, "forked": forked, "spawned": spawned, "own": own}))


def _generate(target, **options):
    return td.generate(target, None, IDS, **ASKED, **options)
