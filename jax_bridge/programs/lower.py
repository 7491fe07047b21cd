"""Lowers torch steps to JAX programs: parameters are an argument, the state is donated."""

from __future__ import annotations

import gc
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count as count_from
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torchax.tensor import Tensor as Traced
from torchax.view import View

import jax_bridge.ops  # noqa: F401 - registers the lowerings
from jax_bridge._torchax import call_torch, environment, sharing
from jax_bridge.arrays import to_numpy
from jax_bridge.compilations import compilations, count
from jax_bridge.weights.codes import reading_prompts
from jax_bridge.weights.formats import bound
from torch_dflash.decode import Pair, decode_round
from torch_dflash.guards.processes import check_process
from torch_dflash.guards.reentry import check_outside, entering, holding
from torch_dflash.progress import Compiling
from torch_dflash.rows import admit, begin, feed, prefill
from torch_dflash.targets.autocast import uncast
from torch_dflash.targets.hooks import restoring_attributes

_LOWERING = {"torchax", "jax", "jaxlib", "torch"}
_tracing = threading.RLock()
_TRACED = (
    "calls an engine with runtime='xla' while JAX traces a step, in which no other program can run; call one "
    "with runtime='eager'."
)
EXACT = {"xla_allow_excess_precision": False}
"""Round every half-precision value, as torch does. XLA may skip roundings where it fuses operations, and its
fusions depend on the number of rows: a step would decide near-ties differently from a block."""


def lower(step: Callable) -> Callable:
    """A JAX function of torch's ``step(params, *args)``, for parameters in a runtime's formats."""

    def lowered(params: Any, *args: Any) -> Any:
        with bound(params) as arrays:
            return call_torch(step, arrays, *args)

    lowered.__name__ = getattr(getattr(step, "func", step), "__name__", "step")  # the program's, in profiles
    return lowered


def lower_begin(pair: Pair) -> Callable:
    """``(params, rows) -> state``."""
    return lower(partial(begin, pair))


def lower_prefill(pair: Pair) -> Callable:
    """``(params, state, chunk) -> state``."""
    return _lower_pass(partial(prefill, pair), pair, prompts=True)


def lower_admit(pair: Pair) -> Callable:
    """``(params, state, row, requests) -> state``."""
    return lower(partial(admit, pair))


def lower_feed(pair: Pair) -> Callable:
    """``(params, state, row, chunk) -> state``."""
    return _lower_pass(partial(feed, pair), pair, prompts=True)


def lower_rounds(pair: Pair, width: int | None = None, fewest: int = 1) -> Callable:
    """``(params, state, most, wanted) -> state``: ``most`` rounds on the device, or until all rows are done.

    ``most`` defaults to the plan's ``rounds_per_chunk``; ``wanted`` [B]: rows whose end is the chunk's;
    ``width``, ``fewest``: as in `decode_round`.
    """
    step = _lower_pass(partial(decode_round, pair, width=width, fewest=fewest), pair)

    def rounds(params: Any, state: Any, most: Any = pair.plan.rounds_per_chunk, wanted: Any = None) -> Any:
        def unfinished(carry):
            count, state = carry
            go_on = (count < most) & ~jnp.all(state.done)
            return go_on if wanted is None else go_on & ~jnp.any(state.done & wanted)

        def one_round(carry):
            count, state = carry
            return count + 1, step(params, state)

        return jax.lax.while_loop(unfinished, one_round, (jnp.int32(0), state))[1]

    return rounds


def _lower_pass(step: Callable, pair: Pair, prompts: bool = False) -> Callable:
    """`lower` of a models' pass that leaves no traced tensor in the models (`restoring_attributes`).

    ``prompts``: the pass reads prompts.
    """

    def whole(*args: Any) -> Any:
        with Constants(), reading_prompts() if prompts else nullcontext():
            return step(*args)

    whole.__name__ = getattr(getattr(step, "func", step), "__name__", "step")
    lowered = lower(whole)

    def run(params: Any, *args: Any) -> Any:
        with restoring_attributes(pair):
            return lowered(params, *args)

    run.__name__ = lowered.__name__
    return run


@contextmanager
def tracing(matmul_precision: str) -> Iterator[None]:
    """Traces a step at the plan's precision, without JAX's warnings about torch's index type.

    One thread at a time for all pairs: torchax's modes and the warning filters are the process's.
    """
    # In inference mode torch decomposes composite operators before torchax sees them.
    plain, precise = torch.inference_mode(False), jax.default_matmul_precision(matmul_precision)
    with (
        _tracing,
        entering(_tracing),
        jax.enable_x64(False),  # every program computes in 32 bits, whatever the process has set
        plain,
        precise,
        sharing(),
        uncast(),
        warnings.catch_warnings(),
    ):
        # torch indexes with int64, which JAX narrows; every index here fits int32.
        warnings.filterwarnings("ignore", "Explicitly requested dtype int64")
        yield


class Programs:
    """Compiled programs of one pair, by step and argument shapes. Tracing is locked, running is not.

    Args:
        sizes: the programs' capacity, shown while they compile; None: show nothing.
        platform: of their devices; unset: JAX's default.
    """

    def __init__(self, matmul_precision: str, sizes: str | None = None, platform: str | None = None):
        self._precision, self._platform = matmul_precision, platform
        self._compiling = Compiling(sizes)
        self._compiled: dict[Any, Callable] = {}
        self._started: dict[Any, Future] = {}
        self._uncounted: dict[Any, int] = {}
        self._numbers: dict[Any, int] = {}  # of signatures: comparing those takes long
        self._fresh = count_from(0)
        self._signed: tuple[Any, int] = None, 0  # the latest weights, and their signature's number
        self._lock = threading.Lock()

    def get(self, name: str, step: Callable, args: tuple, donate: tuple[int, ...] = ()) -> Callable:
        """The program of ``step`` for arguments shaped like ``args``; arguments ``donate`` are consumed."""
        check_process("xla")
        check_outside(_tracing, why=_TRACED)
        key = self._key(name, args)
        program = self._compiled.get(key)
        if program is None:
            try:
                program = self._start(key, step, args, donate).result()
            except BaseException:
                self._started.pop(key, None)  # the next call may have more memory
                raise
            self._compiled[key] = program
            count(self._uncounted.pop(key, 0))
        return program

    def shapes(self, step: Callable, args: tuple) -> Any:
        """Shapes and types of the result of ``step`` for arguments shaped like ``args``."""
        with holding(self._lock), tracing(self._precision):
            return jax.eval_shape(step, *args)

    def start(self, name: str, step: Callable, args: tuple, donate: tuple[int, ...] = ()) -> Future:
        """Trace a program that `get` will ask for; a thread compiles it. Done when it is compiled."""
        return self._start(self._key(name, args), step, args, donate)

    def release(self) -> None:
        """Hold no weights."""
        self._signed = None, 0

    def _key(self, name: str, args: tuple) -> tuple:
        return name, *map(self._number, args)

    def _number(self, arg: Any) -> int:
        """Equal for arguments of one program. Weights come in the same dict while none changes."""
        known, number = self._signed
        if arg is known and known is not None:
            return number
        leaves, kind = jax.tree.flatten(arg)
        number = self._numbers.setdefault((kind, tuple(map(_signature, leaves))), next(self._fresh))
        if isinstance(arg, dict):
            self._signed = arg, number
        return number

    def _start(self, key: tuple, step: Callable, args: tuple, donate: tuple[int, ...]) -> Future:
        with holding(self._lock):  # tracing swaps weights in the shared skeleton
            if key not in self._started:
                end = self._compiling.start(_shown_name(key[0], args))
                try:
                    with tracing(self._precision), _uncollected():
                        lowered = jax.jit(step, donate_argnums=donate).lower(*args)
                except BaseException as error:
                    end()
                    if _of_lowering(error):
                        raise ValueError(
                            f"runtime='xla': {key[0]} cannot be lowered ({type(error).__name__}: {error}); "
                            "pass runtime='eager'."
                        ) from error
                    raise
                self._started[key] = started = Future()
                started.add_done_callback(lambda _: end())
                threading.Thread(target=self._compile, args=(key, lowered, started), name=key[0]).start()
            return self._started[key]

    def _compile(self, key: tuple, lowered: Any, started: Future) -> None:
        try:
            platform = self._platform or jax.default_backend()
            program = lowered.compile(EXACT if platform == "cpu" else None)
            self._uncounted[key] = compilations()  # of this thread, which does nothing else
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(program)


def _shown_name(name: str, args: tuple) -> str:
    if name == "prefill":
        return f"prompts of {args[-1].ids.shape[1]} tokens"
    return {"begin": "an empty state", "caches": "the caches", "read": "the results' read"}.get(name, name)


@contextmanager
def _uncollected() -> Iterator[None]:
    # The collector of cyclic garbage would visit all objects of torch and JAX each time. It is the process's:
    # garbage of other threads waits too.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _of_lowering(error: BaseException) -> bool:
    """Whether the lowering raised ``error``, as for an operation that torchax does not know."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    home = at.tb_frame.f_globals.get("__name__", "").partition(".")[0] if at is not None else ""
    return isinstance(error, Exception) and not isinstance(error, MemoryError) and home in _LOWERING


def _signature(leaf) -> tuple:
    # Programs depend on shardings: one model on two meshes has two.
    return leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)


AHEAD = 3
"""Programs of a runtime that may compile at once: each takes host memory."""


def run_pipelined(
    programs: Programs, steps: Sequence[tuple[str, Callable[[Any], tuple]]], state: Any, bar: Any
) -> Any:
    """The state after all ``steps``. While some are compiled or run, the next is traced.

    A program's first run takes long too: XLA's CPU runtime then prepares its products, one by one.

    Args:
        programs: compiles them.
        steps: each with its name in the bar and ``state -> (name, step, args, donate)`` for `Programs.get`,
            where ``args`` hold the state and the step returns the next one. Called to trace and to run.
        state: consumed.
        bar: advances with each step that runs.
    """
    waiting: deque[tuple[str, Callable[[Any], tuple], Future]] = deque()

    def run_next() -> Any:
        shown, step, _ = waiting.popleft()
        bar.set_description(shown)  # it may still compile for long
        name, function, args, donate = step(state)
        following = programs.get(name, function, args, donate)(*args)
        bar.update()
        return following

    for shown, step in steps:
        bar.set_description(shown)
        waiting.append((shown, step, programs.start(*step(state))))
        while waiting and (waiting[0][2].done() or len(waiting) >= AHEAD):
            state = run_next()
    while waiting:
        state = run_next()
    return state


class Constants(TorchFunctionMode):
    """While open, a torch tensor that meets traced ones becomes a constant of the program.

    The engine compiles anew when such a tensor is written or replaced (`torch_dflash.targets.guard`).

    Raises:
        ValueError: the tensor is a weight or of a tensor subclass: later changes would not be seen.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _mixes_plain_and_traced(args, kwargs):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _constant, (args, kwargs))
        return func(*args, **kwargs)


def _mixes_plain_and_traced(args: Any, kwargs: Any) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    return (
        len({isinstance(leaf, Traced | View) for leaf in leaves if isinstance(leaf, torch.Tensor | View)}) > 1
    )


def _constant(leaf: torch.Tensor) -> Any:
    if isinstance(leaf, Traced | View):
        return leaf
    if type(leaf) is not torch.Tensor:
        raise ValueError(
            f"runtime='xla': a forward reads a {type(leaf).__name__} {tuple(leaf.shape)} that is no "
            "parameter or buffer of the target (a closure over another module?); later changes of it would "
            "not be seen. Register it in the module, or pass runtime='eager'."
        )
    return environment().j2t_iso(jnp.asarray(to_numpy(leaf)))
