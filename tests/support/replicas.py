"""Replicas on four CPU devices, compared with one engine. Run as a module, in a separate process."""

import json
import sys
from collections import Counter
from typing import Any, NamedTuple

import torch

from support.slices import PICKS, make_sliceable, run_on_four
from support.threads import in_threads

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute")


class Case(NamedTuple):
    """A pair (`support.slices.make_sliceable`), and the form of its replicas.

    ``rows``: prompts. ``capacity``: each replica's ``batch_size``. ``runtime``: the one engine's.
    ``break_by``: a key of `BREAKS`.
    """

    family: str
    cache: str
    mesh: int
    replicas: int
    pick: str
    drafter: str
    rows: int = 5
    capacity: int = 1
    compiled: dict[str, Any] = {}
    runtime: str = "xla"
    break_by: str = ""


def ragged(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids, mask = torch.randint(1, 96, (rows, 15), generator=generator), torch.ones(rows, 15, dtype=torch.long)
    for row in range(rows):
        mask[row, : 3 * row % 14] = 0
    return ids, mask


def compare(case: Case) -> dict[str, Any]:
    """Texts and acceptance lengths of one engine and of replicas, and the devices of the replicas."""
    import torch_dflash as td

    target, drafter = make_sliceable(case.family, "2x2", case.drafter)
    asked: dict[str, Any] = {"eos_token_id": None, "seed": 5, "return_dict_in_generate": True}
    asked |= PICKS[case.pick] | {"max_new_tokens": [24 - 3 * row for row in range(case.rows)]}
    options = {"max_length": 48, "cache": case.cache, "prefill_chunk_size": 16, "rounds_per_chunk": 2}
    options |= {"filters": case.pick == "filters"} | case.compiled
    one = td.compile(target, drafter, batch_size=case.rows, runtime=case.runtime, **options)
    with counted() as traced_by_one:
        wanted = one.generate(*ragged(case.rows), **asked)
    front: Any = td.compile(
        target, drafter, batch_size=case.capacity, mesh=case.mesh, replicas=case.replicas, **options
    )
    BREAKS[case.break_by](front) if case.break_by else None
    seen = [state_devices(engine) for engine in front.engines]
    with counted() as traced:
        front.generate(*ragged(case.rows), **asked) if case.runtime == "eager" else front.warmup(
            progress=False
        )
    found = [front.generate(*ragged(case.rows), **asked) for _ in range(2)]
    more, calls = {}, range(3)

    def speak(at: int) -> None:
        more[at] = front.generate(*ragged(case.rows), **asked).sequences.tolist()

    errors = in_threads(*[lambda at=at: speak(at) for at in calls])
    return {
        "one": [wanted.sequences.tolist(), wanted.stats.acceptance_lengths],
        "replicas": [[out.sequences.tolist(), out.stats.acceptance_lengths] for out in found],
        "threads": [str(error) for error in errors] or [more[at] for at in calls],
        "compiled": [out.stats.compilations for out in found],
        "shares": [share.rows for share in found[0].stats.replicas],
        "states": [sorted(devices) for devices in seen],
        "weights": [sorted(weight_devices(engine)) for engine in front.engines],
        "exchanged": exchanged(front),
        "traced": [traced_by_one["_decode_round"], traced["_decode_round"]],
    }


class counted:  # noqa: N801 - reads as a function
    """Counts torch's runs of each step: each run is a trace."""

    def __enter__(self) -> Counter:
        from torch_dflash.decode import Pair

        self.kept, calls = Pair.run, Counter()

        def run(pair: Any, step: Any, *args: Any) -> Any:
            calls[step.__name__] += 1
            return self.kept(pair, step, *args)

        Pair.run = run
        return calls

    def __exit__(self, *_: Any) -> None:
        from torch_dflash.decode import Pair

        Pair.run = self.kept


def weight_devices(engine: Any) -> set[int]:
    import jax

    leaves = jax.tree.leaves(engine._params())
    return {device.id for leaf in leaves for device in leaf.devices()}


def state_devices(engine: Any) -> set[int]:
    """The devices of the engine's states, filled at each later reading."""
    seen, runtime = set(), engine.runtime
    read = runtime.read

    def noted(state: Any, *args: Any) -> Any:
        seen.update(device.id for device in state.tokens.devices())
        seen.update(device.id for device in state.cache[0].key.devices()) if hasattr(
            state.cache[0], "key"
        ) else None
        return read(state, *args)

    runtime.read = noted
    return seen


def exchanged(front: Any) -> list[str]:
    """The kinds of collectives in the compiled programs of all replicas."""
    texts = [program.as_text() for program in front.runtime._programs._compiled.values()]
    return [kind for kind in COLLECTIVES if any(kind in text for text in texts)]


def on_one_device(front: Any) -> None:
    for engine in front.engines[1:]:
        engine.runtime._settle(front.runtime._place)


BREAKS = {"one device": on_one_device}


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    return json.loads(run_on_four(["-m", "support.replicas"], json.dumps(cases)).splitlines()[-1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([compare(Case(*fields)) for fields in json.load(sys.stdin)]))
