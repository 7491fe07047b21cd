"""Several processes that serve a call as one: what process 0 is asked for runs in all of them.

Which processes these are is the bridge's matter (`jax_bridge.hosts`). Alone, one does nothing of this.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from pprint import pformat
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import GenerationConfig

from torch_dflash.engine.width import Widths
from torch_dflash.proposers.composed import inner_of, key_of
from torch_dflash.requests.request import UNSET, Request
from torch_dflash.requests.row_values import drawn_seed
from torch_dflash.requests.stopping import Deadline
from torch_dflash.runtime import Progress, Runtime
from torch_dflash.state import DecodeState
from torch_dflash.targets.guard import settings
from torch_dflash.targets.weights import model_of

T = TypeVar("T")
READ = "what it reads"
CHECK_EVERY = 32
"""Chunks between two comparisons of the text that the processes hold."""
_NUMBER = re.compile(r" at 0x[0-9a-f]+")
"""How Python shows an object: by an address of this process's own."""


@runtime_checkable
class Hosts(Protocol):
    """This process among the others of a mesh."""

    @property
    def first(self) -> bool:
        """Whether what this process is given counts."""
        ...

    def order(self, mesh: Any) -> str:
        """The devices of ``mesh`` in their order."""
        ...

    def agree(self, what: str, said: dict[str, str], given: bytes | None = None) -> bytes:
        """Meet the others in the call ``what``, and return what process 0 was ``given``.

        Raises:
            RuntimeError: something that is ``said`` differs, in all of them; or one did not come.
        """
        ...

    def leaving(self, what: str) -> AbstractContextManager[None]:
        """While open, the others end if this process fails."""
        ...

    def leave(self, what: str, error: BaseException) -> None:
        """Have the others end, for this process will not do its part of ``what``."""
        ...

    def resting(self, what: str) -> AbstractContextManager[None]:
        """While open, a user's code has the turn in ``what``, and needs nobody."""
        ...

    def step(self) -> None:
        """Begin what all have to take part in: one that does not is missed."""
        ...

    def lead(self) -> Any:
        """Of a stream, what decides how far it goes: ``go()`` and ``stop()``."""
        ...


def read_together(
    hosts: Hosts | None,
    what: str,
    said: dict[str, str],
    given: tuple[Any, Any, dict[str, Any]],
    read: Callable[..., T],
    digest: Callable[[T], dict[str, str]],
) -> T:
    """``read`` of the prompts, mask and options that process 0 was ``given``; the seed is drawn there.

    Args:
        said: what has to be the same in all processes before.
        digest: as in `read_alike`.

    Raises:
        RuntimeError: the processes differ. Whatever ``read`` does, in all of them.
    """
    if hosts is None:
        return read(*given)
    input_ids, attention_mask, options = given
    if options.get("seed") is None:
        options["seed"] = drawn_seed()
    with _telling(hosts, what):
        own = packed(given) if hosts.first else None
    sent = hosts.agree(what, said, own)
    return read_alike(hosts, what, lambda: read(*unpacked(sent, given)), digest)


def read_alike(
    hosts: Hosts | None, what: str, read: Callable[[], T], digest: Callable[[T], dict[str, str]]
) -> T:
    """``read()``, of which the ``digest`` has to be the same in all processes.

    Raises:
        RuntimeError: the processes differ. Whatever ``read`` and ``digest`` do, in all of them.
    """
    if hosts is None:
        return read()
    with _telling(hosts, what):
        found = read()
        said = {READ: "no error"} | digest(found)
    hosts.agree(what, said)
    return found


@contextmanager
def _telling(hosts: Hosts, what: str) -> Iterator[None]:
    """While open, the others hear of an error, unless they have it, too. Ctrl-C waits for nobody."""
    try:
        yield
    except Exception as error:
        hosts.agree(what, {READ: f"{type(error).__name__}: {error}"})
        raise
    except BaseException as error:
        hosts.leave(what, error)
        raise


def said_of(hosts: Hosts | None, mesh: Any, target: Any, drafter: Any, *engine: Any) -> dict[str, str]:
    """What has to be the same in all processes before a call, weights apart: devices, models, an engine."""
    if hosts is None:
        return {}
    said = {"the mesh": hosts.order(mesh)}
    for name, given in (("the target", target), ("the drafter", drafter)):
        one = inner_of(given)
        known = [getattr(one, kept, None) for kept in ("key", "checkpoint")]
        # In lines, for only these show a set in one order: Python's own differs by process.
        shown = _NUMBER.sub("", pformat((settings(getattr(one, "config", None)), key_of(given)), width=1))
        said[name] = f"{type(model_of(one)).__name__} {_crc((shown, known))}"
    for part in engine:
        named = {option.name: repr(getattr(part, option.name)) for option in fields(part)}
        said |= {name: value for name, value in named.items() if name != "mesh"}  # by its order
    return said


def digest_of(request: Request, *more: Any) -> dict[str, str]:
    """What has to be the same in what was read, in short.

    Raises:
        ValueError: each process would end the text by a clock of its own.
    """
    if any(isinstance(halt, Deadline) for halt in request.stopping):
        raise ValueError(
            "max_time with a mesh of several processes: each has a clock of its own; leave it out, or pass "
            "max_new_tokens."
        )
    named = {option.name: getattr(request, option.name) for option in fields(request)}
    named["stopping"] = [(type(one).__name__, getattr(one, "strings", None)) for one in request.stopping]
    named["rows"] = [row.tolist() for row in request.rows]
    asked = f"a request of {request.lengths} and {request.max_new_tokens} tokens"
    return {READ: f"{asked}, {_crc((named, more))}"}


def digest_of_state(runtime: Runtime, state: DecodeState | None) -> dict[str, str]:
    """What has to be the same in a state, if any: all of it but what its texts and the weights decide.

    Raises:
        ValueError: it was consumed before.
    """
    if state is None:
        return {}
    leaves = pytree.tree_leaves(runtime.fetch(replace(state, cache=(), proposer=())))
    return {"the state": _crc([leaf.numpy().tobytes() for leaf in leaves])}


def check_alone(hosts: Hosts | None, what: str) -> None:
    """Raise ``ValueError`` for what several processes do not do together."""
    if hosts is not None:
        raise ValueError(
            f"{what} with a mesh of several processes: what it keeps is each one's own; call generate with "
            "the whole text, or decode on the devices of one process."
        )


def check_widths(hosts: Hosts | None, widths: Widths) -> None:
    """Raise ``ValueError`` for a width of rounds that each of several processes would choose by its clock."""
    if hosts is not None and len(widths.widths) > 1:
        raise ValueError(
            "verify_width='auto' with a mesh of several processes: each would choose by its own clock; pass "
            "a number of rows, or leave it out."
        )


def together(
    hosts: Hosts | None, steps: Iterator[Progress], over: Callable[[], bool], streamed: bool
) -> Generator[Progress, None, None]:
    """``steps`` of a generation, done by all processes at once.

    Args:
        over: whether the last step was the last.
        streamed: whether it may be left before: all leave it where process 0 does.
    """
    if hosts is None:
        yield from steps
        return
    lead = hosts.lead() if streamed else None
    with hosts.leaving("a generation"):
        count = 0
        while (progress := next(steps, None)) is not None:
            count += 1
            if count % CHECK_EVERY == 0:
                hosts.agree("the middle of a generation", {"the text": _crc(_texts(progress))})
            try:
                with hosts.resting("a generation") if streamed else nullcontext():
                    yield progress
            except GeneratorExit:
                if lead is not None and not over() and not lead.stop():
                    raise RuntimeError("this stream was left, and process 0 goes on with it.") from None
                return
            if lead is not None and not over() and not lead.go():
                return
            if not over():  # whoever leaves a stream at its end has not asked for more
                hosts.step()


def leaving(hosts: Hosts | None, what: str) -> AbstractContextManager[None]:
    """While open, the others end if this process fails in ``what``."""
    return nullcontext() if hosts is None else hosts.leaving(what)


def _texts(progress: Progress) -> list[Any]:
    texts = zip(progress.tokens, progress.known, strict=True)
    return [[row[:end].tobytes() for row, end in texts], progress.rounds.tolist(), progress.ended.tolist()]


def _crc(said: Any) -> str:
    return f"{zlib.crc32(repr(said).encode()):08x}"


_KINDS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "tensor": lambda found: torch.tensor(found[1], dtype=getattr(torch, found[0])).reshape(found[2]),
    "config": lambda found: GenerationConfig.from_dict(dict(found)),
    "unset": lambda found: UNSET,
}


def packed(given: Any) -> bytes:
    """Numbers, strings, lists, dicts, tensors and generation configs of ``given``; `unpacked` reads them.

    What else it holds, a tokenizer say, stays where it is.
    """
    return json.dumps(_plain(given)).encode()


def unpacked(sent: bytes, own: Any) -> Any:
    """What `packed` was given in another process; what that kept is ``own``'s, in the same place."""
    return _read(json.loads(sent), own)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if value is UNSET:
        return {"unset": []}
    if isinstance(value, GenerationConfig):
        return {"config": _plain(value.to_dict())["dict"]}
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": [name, value.detach().flatten().tolist(), list(value.shape)]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(name), _plain(one)] for name, one in value.items()]}
    return {"own": []}


def _read(sent: Any, own: Any) -> Any:
    if not isinstance(sent, dict):
        return sent
    ((kind, found),) = sent.items()
    if kind == "own":
        return own
    if kind in ("list", "tuple"):
        owns = own if isinstance(own, list | tuple) and len(own) == len(found) else [None] * len(found)
        return _KINDS[kind](_read(one, mine) for one, mine in zip(found, owns, strict=True))
    if kind in ("dict", "config"):
        names = [(_read(name, None), one) for name, one in found]
        owns = own if isinstance(own, dict) else {}
        return _KINDS[kind]((name, _read(one, owns.get(name))) for name, one in names)
    return _KINDS[kind](found)
