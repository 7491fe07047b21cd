"""The eager runtime: PyTorch's own operators, on the models' device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_dflash.decode import Pair, Params, decode_round
from torch_dflash.plan import DecodePlan
from torch_dflash.rows import RowRequests, admit, begin, feed, prefill, rewind
from torch_dflash.runtime import HostRead, Rounds, host_read
from torch_dflash.state import DecodeState, PromptChunk


class EagerRuntime:
    """`Runtime` of PyTorch's own operators, on the models' device."""

    compilations = 0

    def __init__(self, pair: Pair, plan: DecodePlan):
        self.pair = pair
        self.plan = plan
        self._own: Any = None

    def check_memory(self, tensors: Params) -> None:
        """Nothing is copied."""

    def refresh(self, tensors: Params) -> Params:
        """The live tensors themselves: nothing is copied."""
        return tensors

    def forget(self, tensors: Params) -> None:
        """Nothing to forget."""

    def release(self) -> None:
        """The weights are the user's."""

    def fingerprint(self, tensors: Params) -> str:
        """Unused: an eager engine has one process."""
        return ""

    def begin(self, params: Params, rows: RowRequests, stale: bool = False) -> DecodeState:
        def afresh(pair: Pair, *args: Any) -> DecodeState:
            pair.target.forget()  # a weight may have been written since
            return begin(pair, *args)

        return self._step(afresh, params, rows)

    def retire(self, state: DecodeState) -> None:
        """Nothing to recycle."""

    def prefill(self, params: Params, state: DecodeState, chunk: PromptChunk) -> DecodeState:
        return _checked(self._step(prefill, params, state, chunk))

    def admit(self, params: Params, state: DecodeState, row: int, requests: RowRequests) -> DecodeState:
        return self._step(admit, params, _separate(state), torch.tensor(row), requests)

    def feed(self, params: Params, state: DecodeState, row: int, chunk: PromptChunk) -> DecodeState:
        return _checked(self._step(feed, params, _separate(state), torch.tensor(row), chunk))

    def assign(self, state: DecodeState, page_table: np.ndarray | None, done: np.ndarray) -> DecodeState:
        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.tensor(values, device=state.done.device)

        table = state.page_table if page_table is None else tensor(page_table)
        return replace(state, page_table=table, done=tensor(done))

    def record_from(self, state: DecodeState, known: np.ndarray) -> DecodeState:
        start = torch.tensor(known, dtype=torch.int32, device=state.done.device)
        return replace(state, record=state.record | {"start": start})

    def advance(
        self,
        params: Params,
        state: DecodeState,
        turn: Rounds | None = None,
        wanted: np.ndarray | None = None,
    ) -> DecodeState:
        turn = turn or Rounds.of(self.plan)
        for _ in range(turn.rounds):
            if state.done.all() or wanted is not None and bool(state.done.cpu().numpy()[wanted].any()):
                break
            state = _checked(self._step(partial(decode_round, width=turn.width), params, state))
        return state

    def rewind(
        self, params: Params, state: DecodeState, kept: np.ndarray, rows: RowRequests, snapshot: Any = None
    ) -> DecodeState:
        return self._step(rewind, params, state, torch.from_numpy(kept), rows, snapshot)

    def read(self, state: DecodeState, known: np.ndarray, rounds: np.ndarray) -> HostRead:
        device = state.length.device
        at = (torch.from_numpy(values).to(device) for values in (known, rounds))
        return pytree.tree_map(lambda leaf: leaf.cpu().numpy(), host_read(self.plan, state, *at))

    def fetch(self, part: Any) -> Any:
        return pytree.tree_map(torch.clone, part)

    def place(self, state: DecodeState) -> DecodeState:
        return state  # every step moves its arguments to the parameters' device

    def holds(self, state: DecodeState) -> bool:
        return True  # as `place`

    def import_state(self, params: Params, state: DecodeState) -> DecodeState:
        if self._own is None:
            shapes = {name: torch.empty_like(leaf, device="meta") for name, leaf in params.items()}
            self._own = _shapes(begin(self.pair, shapes, RowRequests.idle(self.plan, "meta")))
        if _shapes(state) != self._own:
            raise ValueError(
                "the state is one of another plan or proposer than this engine's; go on with the engine that "
                "made it, or with one compiled alike."
            )
        if not isinstance(state.done, torch.Tensor):
            raise TypeError("the state holds JAX's arrays; pass jax_bridge.state_to_torch(state).")
        return state

    def export_state(self, params: Params, state: DecodeState) -> DecodeState:
        return state

    def warmup(self, params: Params, buckets: list[int], progress: bool | None, slots: bool = False) -> None:
        """Nothing to compile."""

    def _step(self, step, params: Params, *args):
        device = next(iter(params.values())).device

        def ordinary(tensor: torch.Tensor) -> torch.Tensor:
            # A tensor made in inference mode cannot be written later.
            tensor = tensor.clone() if tensor.is_inference() else tensor
            return tensor if tensor.device == device else tensor.to(device)

        with torch.inference_mode(False), torch.no_grad():
            return step(self.pair, params, *pytree.tree_map_only(torch.Tensor, ordinary, args))


def _shapes(state: DecodeState) -> Any:
    return pytree.tree_structure(state), [getattr(leaf, "shape", ()) for leaf in pytree.tree_leaves(state)]


def _separate(state: DecodeState) -> DecodeState:
    """``state`` with a copy of each leaf whose memory an earlier leaf has: a row is written in place."""
    seen: set[int] = set()

    def own(leaf: torch.Tensor) -> torch.Tensor:
        place = leaf.untyped_storage().data_ptr()
        shared = place in seen
        seen.add(place)
        return leaf.clone() if shared else leaf

    return pytree.tree_map_only(torch.Tensor, own, state)


def _checked(state: DecodeState) -> DecodeState:
    """Assert invariants whose violation lowers acceptance but leaves the text right."""
    committed = getattr(state.proposer, "committed", None)
    assert committed is None or torch.equal(committed, state.length), (
        f"proposer has read {committed.tolist()} tokens, the target {state.length.tolist()}"
    )
    assert bool((state.done | (state.length < state.limit)).all()), "a live row is past its limit"
    return state


def make_eager(options: Any, pair: Pair, *more: Any) -> list[EagerRuntime]:
    """The runtimes of an engine, as `torch_dflash.engine.bridge.make_runtimes` asks."""
    return [EagerRuntime(pair, pair.plan)]
