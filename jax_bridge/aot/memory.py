"""Memory of a pair on a slice: its need, the largest batch and context that fit, the smallest slice.

Bytes of weights and states are known from shapes. Temporaries of programs grow by a few MB a layer, so
programs of a few layers tell them (`jax_bridge.aot.sizes`). The largest size found is then compiled whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from jax_bridge.aot.floor import generation_of
from jax_bridge.aot.report import CompileError, compiling, libtpu_version
from jax_bridge.aot.shapes import find_topology, slice_devices
from jax_bridge.aot.sizes import HBM, PROGRAMS, Size, Spread, needed, smallest_slices, spread, temporaries
from jax_bridge.aot.traffic import Laid, Unfilled
from jax_bridge.device_memory import format_bytes
from torch_dflash.checks import positions_of

STEP = 64
"""Step of the tried contexts, in positions; the step of rows is one."""
MOST_ROWS = 4096
TRIES = 3
"""Attempts with whole programs, each a little smaller than the last."""


def fit_memory(
    target: PreTrainedConfig,
    drafter: Any,
    *,
    topology: str = "v5e:2x4",
    chips: int | None = None,
    context: int = 4096,
    batch_size: int = 1,
    search: tuple[str, ...] = ("batch", "context"),
    confirm: bool = True,
    programs: bool = True,
    say: Callable[[str], None] = lambda line: None,
    **plan: Any,
) -> dict[str, Any]:
    """The memory that a pair needs on each chip, and the sizes that fit: no weights, no chip.

    Args:
        target, drafter: as in `jax_bridge.aot.compile.abstract_pair`; weights are counted in bfloat16.
        topology: generation and shape as libtpu names them: "v5p:2x2x1", "v5e:2x4".
        chips: number of its first chips, which share each weight; unset: all of them.
        context: positions that each row may fill.
        batch_size: rows B; each may fill the whole context.
        search: sizes whose largest fitting value is sought, each with the other one as given.
        confirm: compile the whole pair at the size found, which takes minutes for a large one; else the
            programs of a few layers decide.
        programs: count temporaries of programs; else nothing is compiled, arrays are not padded to whole
            tiles, and the answer comes at once.
        say: called with a line before every compilation.
        plan: further options of the pair, such as ``cache="paged"`` and ``quantize=``.

    Returns:
        Bytes of one chip by purpose (``bytes``: `jax_bridge.aot.sizes.HELD` and temporaries),
        ``needed_bytes`` of ``hbm_bytes``; ``weights_bytes`` of the models, uncut; ``largest`` by ``search``;
        ``slices``: the smallest of each generation for one row of this context, with the same temporaries.

    Raises:
        ModuleNotFoundError: libtpu is not installed. ValueError, TypeError: no such topology, no pair, or one
        that is not decoded on several chips. CompileError: even a few layers do not fit.
    """
    hbm, size = HBM[generation_of(topology)], Size(batch_size, context)
    chips = len(find_topology(topology).devices) if chips is None else chips
    pair = spread(target, drafter, size, topology, slice_devices(topology, chips).size, **plan)
    fit = _Fit(pair, size, hbm, positions_of(target), programs, say)
    held, spent = fit.held(size), fit.spent(size)
    total = needed(held, _most(spent))
    return {
        "topology": topology,
        "chips": chips,
        "libtpu": libtpu_version(),
        "context": context,
        "batch": batch_size,
        "layers": len(pair.whole.pair.target.specs),
        "layers_compiled": pair.layers if programs else 0,
        "weights_bytes": pair.weights,
        "bytes": held | {"temporaries": _most(spent)},
        "temporaries": spent,
        "needed_bytes": total,
        "hbm_bytes": hbm,
        "fits": total <= hbm,
        "largest": {what: fit.largest(what, confirm and programs) for what in search},
        "slices": smallest_slices(pair, Size(1, context), fit.known, _most(spent)),
    }


def _most(spent: dict[str, int]) -> int:
    return max(spent.values(), default=0)


class _Fit:
    """Sizes of a pair that fit ``hbm`` bytes, from ``size`` on; programs of each size are compiled once."""

    def __init__(self, pair: Spread, size: Size, hbm: int, positions: int, programs: bool, status: Any):
        self.pair, self.size, self.hbm, self.status = pair, size, hbm, status
        self._most = {"batch": MOST_ROWS, "context": positions}
        self._spent: dict[Size, dict[str, int]] = {}
        self._programs = PROGRAMS if programs else ()
        self.known = self._first() if programs else Unfilled()

    def held(self, size: Size) -> dict[str, int]:
        """Bytes of arrays on one chip."""
        return self.pair.held(size, self.known)

    def spent(self, size: Size) -> dict[str, int]:
        """Temporaries by program, of a few layers."""
        if size not in self._spent:
            self._spent[size] = {name: temporaries(self._compile(size, name)) for name in self._programs}
        return self._spent[size]

    def largest(self, what: str, confirm: bool) -> dict[str, Any] | None:
        """The largest ``what``; None: not even the smallest fits."""
        slope = self._slope(what)
        found = self._search(what, slope)
        if found is None or not confirm:
            return None if found is None else {"value": found, "confirmed": False}
        unit = 1 if what == "batch" else STEP
        for _ in range(TRIES):
            taken = self._whole(self._at(what, found))
            if taken is not None and taken <= self.hbm:
                return {"value": found, "confirmed": True, "needed_bytes": taken}
            found -= max(unit, found // 32 // unit * unit)
            if found < 1:
                return None
        return {"value": found, "confirmed": False}

    def _slope(self, what: str) -> float:
        """Bytes of temporaries per unit of ``what``, from two sizes."""
        current = getattr(self.size, what)
        other = min(2 * current, self._most[what])
        if other == current:
            return 0.0
        smaller = _most(self.spent(self.size))
        try:
            larger = _most(self.spent(self._at(what, other)))
        except CompileError:  # far too large
            return smaller / current
        return max(0.0, (larger - smaller) / (other - current))

    def _search(self, what: str, slope: float) -> int | None:
        unit, current = 1 if what == "batch" else STEP, getattr(self.size, what)
        first = _most(self.spent(self.size))

        def fits(count: int) -> bool:
            value = min(count * unit, self._most[what])
            try:
                held = self.held(self._at(what, value))
            except ValueError:  # more positions than are counted
                return False
            return needed(held, first + slope * max(0, value - current)) <= self.hbm

        most = -(-self._most[what] // unit)
        if not fits(1):
            return None
        low, high = 1, 2
        while high <= most and fits(high):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return min(low * unit, self._most[what])

    def _at(self, what: str, value: int) -> Size:
        return self.size._replace(**{what: value})

    def _first(self) -> Laid:
        try:
            steps = {name: self._compile(self.size, name) for name in PROGRAMS}
        except CompileError as error:
            held = needed(self.pair.held(self.size, Unfilled()), 0)
            lack = f": {format_bytes(held - self.hbm)} too few" if held > self.hbm else ""
            raise CompileError(
                f"{error} Without programs the whole pair takes {format_bytes(held)} of each chip, which has "
                f"{format_bytes(self.hbm)}{lack}."
            ) from error
        self._spent[self.size] = {name: temporaries(step) for name, step in steps.items()}
        return self.pair.laid(self.size, steps[PROGRAMS[0]])

    def _whole(self, size: Size) -> int | None:
        """Bytes of the whole pair's largest program; None: the compiler refuses one."""
        try:
            return max(self._compile(size, name, whole=True).hbm_bytes for name in PROGRAMS)
        except CompileError as error:
            self.status(f"  {error}")
            return None

    def _compile(self, size: Size, program: str, whole: bool = False) -> Any:
        layers = "all" if whole else str(self.pair.layers)
        rows = f"{size.batch} x {size.context}"
        self.status(f"compiling {program} of {layers} layers for {self.pair.topology}, {rows} positions ...")
        with compiling(program, self.pair.topology):
            step = self.pair.compiled(size, program, whole)
        self.status(f"  {step.compile_seconds:.1f} s, {temporaries(step) / 1e6:.1f} MB besides")
        return step
