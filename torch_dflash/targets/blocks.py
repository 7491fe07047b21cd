"""Finds the decoder blocks of a target in one recorded forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

Path = str
"""A module's name for ``get_submodule``."""


@dataclass(frozen=True)
class Blocks:
    """The modules of a target's layers.

    A layer's output is that of its whole block, transformers' ``hidden_states[layer + 1]``; the last layer's
    is taken before the final norm, unlike transformers'.

    Attributes:
        paths: of each layer's block, in order; empty where ``fault`` is the reason why none can be tapped.
        norm: path of the norm between the last block and the head; None without one.
        idle: paths of modules that do not run for text, such as a tower for images.
        fault: the reason why the layers cannot be tapped, or None.
    """

    paths: tuple[Path, ...] = ()
    norm: Path | None = None
    idle: tuple[Path, ...] = ()
    fault: str | None = None


@dataclass
class _Call:
    path: Path
    given: list[Any]
    result: Any = None


class CallRecorder:
    """Records the calls of ``model``'s modules in one forward: nesting, arguments and results."""

    def __init__(self, model: Any):
        self.model = model
        self.open: list[_Call] = []
        self.calls: list[_Call] = []
        self.callers: dict[int, tuple[Path, ...]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, record calls."""
        with ExitStack() as hooks:
            for path, module in self.model.named_modules():
                before = module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(module.register_forward_hook(self._leave).remove)
            yield

    def attended(self, layer: int) -> None:
        """Note that the running modules attend, or update a recurrent state, for ``layer``."""
        self.callers[layer] = tuple(call.path for call in self.open)

    def _enter(self, path: Path, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = _Call(path, [*args, *kwargs.values()])
        self.open.append(call)
        self.calls.append(call)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self.open.pop().result = result


def find_blocks(recorded: CallRecorder, count: int) -> Blocks:
    """The blocks of a recorded model of ``count`` layers: the modules where the layers' call paths diverge.

    Each block must run once, and get the previous block's result: no tap would contain a change of the
    hidden state between two blocks.
    """
    model = recorded.model
    ways = [recorded.callers[layer] for layer in sorted(recorded.callers)]
    paths = [_single(model, ways[0])] if len(ways) == 1 else _parting(ways)
    paths = _with_silent(dict(zip(sorted(recorded.callers), paths, strict=True)), count)
    fault = _fault(recorded, paths)
    if fault is not None:
        return Blocks(fault=fault)
    found = tuple(map(str, paths))
    return Blocks(found, _norm(recorded, found[-1]), _idle(recorded, found[0]))


def _parting(ways: Sequence[tuple[Path, ...]]) -> list[Path | None]:
    """The first module of each call path that is not on all of them."""
    shared = 0
    while all(len(way) > shared for way in ways) and len({way[shared] for way in ways}) == 1:
        shared += 1
    return [way[shared] if len(way) > shared else None for way in ways]


def _with_silent(paths: dict[int, Path | None], count: int) -> list[Path | None]:
    """``paths`` by layer, with those of stateless layers from the same module list."""
    homes = {(path or "").removesuffix(f".{layer}") for layer, path in paths.items()}
    home = homes.pop() if len(homes) == 1 else None
    siblings = {layer: None if home is None else f"{home}.{layer}" for layer in range(count)}
    return [paths.get(layer, siblings[layer]) for layer in range(count)]


def _single(model: Any, way: tuple[Path, ...]) -> Path | None:
    """The block of a single layer: the outermost module of a list."""
    inside = (path for path in way if path)
    listed = (p for p in inside if isinstance(model.get_submodule(p.rpartition(".")[0]), nn.ModuleList))
    return next(listed, None)


def _fault(recorded: CallRecorder, paths: Sequence[Path | None]) -> str | None:
    """The reason why the modules at ``paths`` cannot be tapped, or None."""
    calls: list[_Call] = []
    for layer, path in enumerate(paths):
        if path is None or paths.count(path) > 1:
            return f"layer {layer} has no module of its own"
        found = [call for call in recorded.calls if call.path == path]
        if len(found) != 1:
            return f"layer {layer} ({path}) runs {len(found)} times a forward"
        calls += found
    width = recorded.model.get_input_embeddings().weight.shape[1]
    for layer, call in enumerate(calls):
        state = output_of(call.result)
        if not isinstance(state, Tensor) or state.ndim != 3:
            return f"layer {layer} ({call.path}) gives no state [B, M, H]"
        if state.shape[2] != width:
            return f"layer {layer} ({call.path}) gives {state.shape[2]} channels, the embedding has {width}"
    for before, after in pairwise(calls):
        state, others = output_of(before.result), _others(before.result)
        if not any(value is state for value in after.given):
            return f"{after.path} does not get the result of {before.path}"
        if any(value is other for value in after.given for other in others):
            return f"{before.path} gives {after.path} more than one state"
    return None


def _norm(recorded: CallRecorder, last: Path) -> Path | None:
    """The module between the last block and the head."""
    state = next(output_of(call.result) for call in recorded.calls if call.path == last)
    head = recorded.model.get_output_embeddings()
    read = [call.given[0] for call in recorded.calls if recorded.model.get_submodule(call.path) is head]
    for call in recorded.calls:
        outside = call.path and not call.path.startswith(f"{last}.") and call.path != last
        reads = any(value is state for value in call.given)
        if outside and reads and any(_is_of(value, call.result) for value in read):
            return call.path
    return None


def _idle(recorded: CallRecorder, block: Path) -> tuple[Path, ...]:
    """Siblings of the path from the model to ``block`` in which no module ran."""
    steps = block.split(".")
    way = {".".join(steps[:depth]) for depth in range(len(steps) - 1)}
    siblings = [path for path, _ in recorded.model.named_modules() if path and path.rpartition(".")[0] in way]
    ran = [f"{call.path}." for call in recorded.calls]
    return tuple(path for path in siblings if not any(one.startswith(f"{path}.") for one in ran))


def _is_of(value: Any, result: Any) -> bool:
    """Whether ``value`` is ``result`` or a view of its rows."""
    return value is result or isinstance(value, Tensor) and value._base is not None and value._base is result


def output_of(result: Any) -> Any:
    """The hidden state of a block's result: the result, or the first of several."""
    return result[0] if isinstance(result, tuple | list) else result


def _others(result: Any) -> list[Tensor]:
    more = result[1:] if isinstance(result, tuple | list) else ()
    # Integers are no state: layers hand on the positions that an indexer chose.
    return [value for value in more if isinstance(value, Tensor) and value.is_floating_point()]


@contextmanager
def tapped(model: Any, blocks: Blocks, taps: tuple[int, ...], outputs: dict[int, Tensor]) -> Iterator[None]:
    """While open, a forward of ``model`` writes the outputs of the layers ``taps`` to ``outputs``.

    Raises:
        ValueError: there are taps, and the layers cannot be tapped.
    """
    if taps:
        check_tappable(model, blocks)
    with ExitStack() as hooks:
        for tap in taps:
            hook = block_of(model, blocks, tap).register_forward_hook(_keep(outputs, tap))
            hooks.callback(hook.remove)
        yield


def check_tappable(model: Any, blocks: Blocks) -> None:
    """Raise ``ValueError`` unless the layers of ``model`` can be tapped."""
    if blocks.fault is not None:
        raise ValueError(
            f"target={type(model).__name__}: {blocks.fault}, so nothing can be drafted from its hidden "
            "states; pass NGramProposer() or None as the drafter."
        )


def block_of(model: Any, blocks: Blocks, layer: int) -> nn.Module:
    """The module of ``layer``."""
    return model.get_submodule(blocks.paths[layer])


def _keep(outputs: dict[int, Tensor], tap: int) -> Any:
    def hook(module: nn.Module, args: Any, result: Any) -> None:
        outputs[tap] = output_of(result)

    return hook
