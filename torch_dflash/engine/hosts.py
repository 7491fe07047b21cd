"""Runs process 0's call in every process of a multi-host mesh.

`jax_bridge.hosts` knows the processes. An engine of one process imports nothing of this.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pprint import pformat
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import GenerationConfig

from torch_dflash.engine.batch import Generation
from torch_dflash.engine.bridge import Hosts
from torch_dflash.engine.engine import Built, Engine
from torch_dflash.engine.models import check_entry
from torch_dflash.engine.session import Session
from torch_dflash.engine.slots import Slots
from torch_dflash.proposers.composed import inner_of, key_of
from torch_dflash.requests.options import EngineOptions
from torch_dflash.requests.read import check_fits
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
"""An object's address as Python prints it, which differs by process."""


def read_broadcast(
    hosts: Hosts,
    what: str,
    facts: dict[str, str],
    given: tuple[Any, Any, Mapping[str, Any]],
    read: Callable[..., T],
    digest: Callable[[T], dict[str, str]],
) -> T:
    """``read`` of the prompts, mask and options that process 0 was ``given``; the seed is drawn there.

    Args:
        facts: what has to be the same in all processes before.
        digest: as in `read_compared`.

    Raises:
        RuntimeError: the processes differ. Whatever ``read`` does, in all of them.
    """
    input_ids, attention_mask, options = given
    if options.get("seed") is None:
        given = input_ids, attention_mask, {**options, "seed": drawn_seed()}
    with _sharing_errors(hosts, what):
        own = packed(given) if hosts.first else None
    sent = hosts.agree(what, facts, own)
    return read_compared(hosts, what, lambda: read(*unpacked(sent, given)), digest)


def read_compared(hosts: Hosts, what: str, read: Callable[[], T], digest: Callable[[T], dict[str, str]]) -> T:
    """``read()``, of which the ``digest`` has to be the same in all processes.

    Raises:
        RuntimeError: the processes differ. Whatever ``read`` and ``digest`` do, in all of them.
    """
    with _sharing_errors(hosts, what):
        found = read()
        facts = {READ: "no error"} | digest(found)
    hosts.agree(what, facts)
    return found


@contextmanager
def _sharing_errors(hosts: Hosts, what: str) -> Iterator[None]:
    """While open, the others hear of an error, unless they have it, too. Ctrl-C waits for nobody."""
    try:
        yield
    except Exception as error:
        hosts.agree(what, {READ: f"{type(error).__name__}: {error}"})
        raise
    except BaseException as error:
        hosts.leave(what, error)
        raise


def facts_of(hosts: Hosts, mesh: Any, target: Any, drafter: Any, *engine: Any) -> dict[str, str]:
    """Devices, models and engine options, which must be the same in all processes before a call."""
    facts = {"the mesh": hosts.order(mesh)}
    for name, given in (("the target", target), ("the drafter", drafter)):
        one = inner_of(given)
        known = [getattr(one, kept, None) for kept in ("key", "checkpoint")]
        # In lines, for only these show a set in one order: Python's own differs by process.
        shown = _NUMBER.sub("", pformat((settings(getattr(one, "config", None)), key_of(given)), width=1))
        facts[name] = f"{type(model_of(one)).__name__} {_crc((shown, known))}"
    for part in engine:
        named = {option.name: repr(getattr(part, option.name)) for option in fields(part)}
        facts |= {name: value for name, value in named.items() if name != "mesh"}  # by its order
    return facts


def digest_of(request: Request, *more: Any) -> dict[str, str]:
    """A digest of a request, which must be the same in all processes.

    Raises:
        ValueError: each process would end the text by a clock of its own.
    """
    if any(isinstance(rule, Deadline) for row in request.rows for rule in row.stopping):
        raise ValueError(
            "max_time with a mesh of several processes: each has a clock of its own; leave it out, or pass "
            "max_new_tokens."
        )
    parts: list[Any] = [request.pad_token_id]
    for row in request.rows:
        stopping = [(type(rule).__name__, getattr(rule, "strings", None)) for rule in row.stopping]
        known: Any = {"prompt": row.prompt.tolist(), "stopping": stopping}
        parts.append(replace(row, **known))
    shown = f"a request of {request.lengths} and {[row.max_new_tokens for row in request.rows]} tokens"
    return {READ: f"{shown}, {_crc((parts, more))}"}


def digest_of_state(runtime: Runtime, state: DecodeState | None) -> dict[str, str]:
    """A digest of a state, if any, without the parts that its texts and the weights decide.

    Raises:
        ValueError: it was consumed before.
    """
    if state is None:
        return {}
    leaves = pytree.tree_leaves(runtime.fetch(replace(state, cache=(), proposer=())))
    return {"the state": _crc([leaf.numpy().tobytes() for leaf in leaves])}


def lockstep(
    hosts: Hosts, steps: Iterator[Progress], over: Callable[[], bool], streamed: bool
) -> Generator[Progress, None, None]:
    """``steps`` of a generation, done by all processes at once.

    Args:
        over: whether the last step was the last.
        streamed: whether it may be left before: all leave it where process 0 does.
    """
    lead = hosts.lead() if streamed else None
    with hosts.collective("a generation"):
        count = 0
        while (progress := next(steps, None)) is not None:
            count += 1
            if count % CHECK_EVERY == 0:
                hosts.agree("the middle of a generation", {"the text": _crc(_texts(progress))})
            try:
                with hosts.paused("a generation") if streamed else nullcontext():
                    yield progress
            except GeneratorExit:
                if lead is not None and not over() and not lead.stop():
                    raise RuntimeError("this stream was left, and process 0 goes on with it.") from None
                return
            if lead is not None and not over() and not lead.go():
                return
            if not over():  # whoever leaves a stream at its end has not asked for more
                hosts.step()


def _texts(progress: Progress) -> list[Any]:
    texts = zip(progress.tokens, progress.known, strict=True)
    return [[row[:end].tobytes() for row, end in texts], progress.rounds.tolist(), progress.ended.tolist()]


def _crc(value: Any) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


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
    """The value that `packed` was given in another process; parts that it kept come from ``own``."""
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


class HostsEngine(Engine):
    """An `Engine` on a mesh of several processes: each makes the same calls, and process 0's arguments count.

    Args:
        hosts: this process among the others. The rest as of `Engine`.
    """

    def __init__(self, target: Any, drafter: Any, options: EngineOptions, hosts: Hosts):
        self.hosts = hosts
        super().__init__(target, drafter, options)

    def _build(self, target: Any, drafter: Any) -> Built:
        if self.options.verify_width == "auto":
            raise ValueError(
                "verify_width='auto' with a mesh of several processes: each would choose by its own clock; "
                "pass a number of rows, or leave it out."
            )
        built = super()._build(target, drafter)
        self._facts = facts_of(self.hosts, self._mesh, target, drafter, self.options, built.pair.plan)
        return built

    def synchronize(self, what: str, state: Any = None, read: Callable[[], Any] = lambda: None) -> Any:
        """``read()``, with every process of the mesh in the same call, of the same ``state``.

        Raises:
            RuntimeError: they are in another, of another engine, or one did not come.
        """
        facts = lambda _: self._facts | self.bits() | digest_of_state(self.runtime, state)  # noqa: E731
        return read_compared(self.hosts, what, read, facts)

    def bits(self) -> dict[str, str]:
        """A checksum of the live weights, for comparison; of a loaded target its checkpoint."""
        return {"their bits": self.runtime.fingerprint(self._live())}

    def compare(self, what: str, read: Callable[[], T], digest: Callable[[T], dict[str, str]]) -> T:
        """``read()``, whose ``digest`` has to be the same in all processes."""
        return read_compared(self.hosts, what, read, digest)

    def shared(self, what: str) -> AbstractContextManager[None]:
        """While open, the others end if this process fails in ``what``."""
        return self.hosts.collective(what)

    def _check(self, request: Request) -> None:
        check_fits(request, self.plan)

    def _own_slots(self) -> Slots:
        raise ValueError(
            "map with a mesh of several processes: each would admit requests by its own clock; call generate "
            "with batch_size rows at a time, or decode on the devices of one process."
        )

    def slots(self, queue: int | None = None) -> Slots:
        return self._own_slots()

    def session(self) -> Session:
        raise ValueError(
            "a session with a mesh of several processes: what it keeps is each one's own; call generate with "
            "the whole text, or decode on the devices of one process."
        )

    def _read(
        self, what: str, input_ids: Any, attention_mask: Any, options: Mapping[str, Any], streamer: Any = None
    ) -> Request:
        read = partial(super()._read, what, streamer=streamer)
        check_entry(self.pair, self.options.runtime)
        digest = lambda found: digest_of(found) | self.bits()  # noqa: E731
        given = input_ids, attention_mask, options
        return read_broadcast(self.hosts, what, self._facts, given, read, digest)

    def _steps(self, generation: Generation, streamed: bool = False) -> Generator[Progress, None, None]:
        return lockstep(self.hosts, super()._steps(generation), lambda: generation.over, streamed)
