"""Compares block decoding with the target's own code, by logits, before any text is made."""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers import TemperatureLogitsWarper as Temperature
from transformers import TopKLogitsWarper as TopK
from transformers import TopPLogitsWarper as TopP

from torch_dflash.cache.view import CACHE
from torch_dflash.checks import Cache, check_cache, check_context, check_counts, context_of
from torch_dflash.decode import Pair
from torch_dflash.ops.windows import positions
from torch_dflash.plan import DecodePlan, whole_tiles
from torch_dflash.proposers.plain import PlainProposer
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.targets.adapter import Target
from torch_dflash.targets.binding import BoundWeights
from torch_dflash.targets.guard import Guard, parts_of
from torch_dflash.targets.hooks import restoring_attributes
from torch_dflash.targets.skeleton import build_skeleton
from torch_dflash.targets.tested import is_as_built, is_tested
from torch_dflash.targets.trace import trace_layers
from torch_dflash.targets.weights import collect_tensors, model_of
from torch_dflash.verify.inplace import WritesToViews
from torch_dflash.verify.result import Agreement
from torch_dflash.verify.twin import PROMPT, SPECIAL, VOCAB, build_twin

BLOCK = 4
STEPS = 6
"""Tokens of a live target's own `generate` in its trial."""
WIDEST = 32
"""Rows of the widest block in a trial."""
MOST_ROWS = 8
MOST_KNOWN = 64
NONSENSE = 1 << 20
"""The cache's reported length in a trial: a model that reads it computes nonsense."""
LONGEST_CHUNK = 512


def check(target: PreTrainedModel, length: int | None = None, cache: str = "static") -> Agreement:
    """Compare block decoding's cached passes with the target's own forward, with its real weights.

    Reads two random prompts of different lengths in chunks, then verifies blocks with some rejected rows.
    Runs eagerly, on the target's device; takes one forward of ``length`` tokens.

    Args:
        target: a transformers causal LM.
        length: tokens; unset: at least 64, and more than the widest sliding window.
        cache: "static" or "paged".

    Raises:
        ValueError: the logits differ by more than rounding, or the target cannot be decoded at all.
    """
    check_counts(least=24, length=length)
    check_cache(cache)
    target = model_of(target)
    skeleton = Target(target)
    windows = [spec.window or 0 for spec in skeleton.specs]
    check_context(target, length or 0)
    length = length or min(context_of(target), max(64, max(windows) + 32))
    agreement = compare(target, skeleton, _ids(skeleton.vocab_size, 2, length), cache, BLOCK)
    if not agreement.holds:
        raise ValueError(
            f"target={type(target).__name__}: block decoding is not what it computes: {agreement}."
        )
    return agreement


class Trial(NamedTuple):
    """Runs code of a target and compares it with block decoding.

    Attributes:
        find: (target, cache, width, rows, keeps) -> the rest of a fault's sentence; None for no fault.
        subject: the sentence's beginning.
        failed: its rest where ``find`` raises {error}; None: the error is raised.
    """

    find: Callable[[Any, str, int, int, bool], str | None]
    subject: str
    failed: str | None = None

    def fault(self, target: Any, shape: tuple[str, int, int], passes: tuple[bool, ...]) -> str | None:
        """The first fault of ``passes``, each with that value of ``keeps``; only the first has to run."""
        for number, keeps in enumerate(passes):
            try:
                found = self.find(target, *shape, keeps)
            except Exception as error:  # user modules and unknown classes may do anything
                if self.failed is None:
                    raise
                first_line = str(error).partition("\n")[0]
                found = self.failed.format(error=f"{type(error).__name__}: {first_line}")
                found = None if number else found
            if found is not None:
                return self.subject + found
        return None


class _Verdict(NamedTuple):
    """The fault of a class with one structure, or None; valid while ``guard`` holds."""

    key: tuple
    guard: Guard
    fault: str | None


_patching = threading.RLock()
_verdicts: weakref.WeakKeyDictionary[Any, list[_Verdict]] = weakref.WeakKeyDictionary()


def verify_class(target: PreTrainedModel, plan: DecodePlan, runtime: str, recurrent: bool = False) -> None:
    """Refuse a target that is not as tested, and whose blocks differ from what its own forward computes.

    A class that is not tested, or is patched, is tried on a tiny random twin, once for each structure. The
    target itself, with its hooks, adapters, attributes and modules, is tried on a short text. Both are tried
    with the plan's cache, width and rows.

    Args:
        recurrent: whether the target has recurrent layers.

    Raises:
        ValueError: the logits differ from those of its own forward, or no twin can be built.
    """
    if is_tested(target, recurrent):
        return
    shape = plan.cache, min(plan.verify_width, WIDEST), min(plan.batch_size, MOST_ROWS)
    fault = next(filter(None, _faults(target, shape, runtime)), None)
    if fault is not None:
        raise ValueError(f"target={type(target).__name__}: {fault}")


def _faults(target: PreTrainedModel, shape: tuple[str, int, int], runtime: str) -> Iterator[str | None]:
    # Attributes that an earlier pass wrote are absent in programs. Eager passes have them, but not those of
    # the live model: their absence may raise an error, and must not change the text.
    passes = (False,) if RUNTIMES[runtime].compiles else (True, False)
    by_twin, loaded = is_as_built(target), target.device.type != "meta"
    if RUNTIMES[runtime].compiles:
        yield WRITES.fault(target, shape, (False,))
    if by_twin:
        yield _fault_of_class(target, shape, passes, runtime)
    if loaded or not by_twin:
        yield LIVE.fault(target, shape, passes)
    if loaded and hasattr(type(target), "generate"):
        yield GENERATE.fault(target, shape, (True,))


def _fault_of_class(target: Any, shape: tuple[str, int, int], passes: tuple, runtime: str) -> str | None:
    """The twin's fault, cached for all models of the class with the same structure."""
    known = _verdicts.setdefault(type(target), [])
    key = repr(target.config.to_dict()), tuple(map(type, parts_of(target.config))), shape, runtime
    for verdict in known:
        if verdict.key == key and verdict.guard.holds():
            return verdict.fault
    fault = TWIN.fault(target, shape, passes)
    known[MOST_KNOWN:] = []
    known.insert(0, _Verdict(key, Guard.of_classes(target), fault))
    return fault


def _find_writes(target: Any, *_: Any) -> str | None:
    skeleton = Target(target).model
    with WritesToViews() as writes:
        trace_layers(skeleton)
    if writes.found is None:
        return None
    return (
        f"its forward writes to tensors through views of them ({writes.found}), which a lowered program may "
        "lose; pass runtime='eager', or verify=False."
    )


WRITES = Trial(_find_writes, "this class is not among those tested, and ")


def _find_in_twin(target: Any, cache: str, width: int, rows: int, keeps: bool) -> str | None:
    twin = build_twin(target)
    skeleton = Target(twin)  # before a forward of the twin, which may write attributes
    ids = _ids(VOCAB, rows, PROMPT + sum(_kept(width)[:-1]) + width)
    ids[:1] = _own_text(twin, ids[:1, :PROMPT], ids.shape[1])
    agreement, odd = compare(twin, skeleton, ids, cache, width, keeps), _unlike_forward(twin, ids[:1])
    odd = _sampled_otherwise(twin, ids[:1, :PROMPT]) if odd is None else odd
    if not agreement.holds:
        return (
            f"a tiny random twin of it is decoded otherwise: {agreement}. Block decoding does not know what "
            "it does; use its own generate."
        )
    if odd is None:
        return None
    return (
        f"its generate does more than its forward: a tiny random twin says another token at position {odd}, "
        "or weighs them otherwise. Block decoding runs the forward alone; use its own generate."
    )


TWIN = Trial(
    _find_in_twin,
    WRITES.subject,
    "no tiny twin of it could be tried ({error}). torch_dflash.check(target) tries the target itself; "
    "verify=False decodes without.",
)


def _find_in_live(target: Any, cache: str, width: int, rows: int, keeps: bool) -> str | None:
    if target.device.type == "meta":
        return "its weights are on the meta device; load them."
    skeleton = Target(target)
    ids = _ids(skeleton.vocab_size, min(rows, 2), PROMPT + sum(_kept(width)[:-1]) + width)
    agreement = compare(target, skeleton, ids, cache, width, keeps, lengths=False)
    if agreement.holds:
        return None
    return (
        f"they make blocks of several tokens other than its own forward: {agreement}. What looks at other "
        "positions than its own, or at a whole sequence, cannot be decoded in blocks; use its own generate."
    )


LIVE = Trial(
    _find_in_live,
    "it has hooks, adapters or modules of its own, and ",
    "it cannot be tried ({error}). verify=False decodes without.",
)


def _find_in_generate(target: Any, *_: Any) -> str | None:
    """Finds hooks that distinguish single tokens from a prompt, and changes of logits in `generate`."""
    alone = copy.copy(target)  # the same modules; another thread may read the target's configs
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    alone.generation_config = GenerationConfig(
        max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    ids = _ids(target.get_input_embeddings().weight.shape[0], 1, PROMPT).long().to(target.device)
    with torch.inference_mode(False), torch.no_grad(), target.device, _evaluating(target):
        out = type(target).generate(alone, ids, attention_mask=torch.ones_like(ids))
        own = _own_logits(target, out.sequences, PROMPT - 1)[:-1].float()
        noise = _noise(target, out.sequences, PROMPT - 1)
    logits = torch.cat(out.logits).float()
    gaps = (logits - own).abs().amax(dim=1).nan_to_num(nan=torch.inf)
    at, kind = PROMPT - 1 + int(gaps.argmax()), out.logits[0].dtype
    agreement = Agreement(float(gaps.max()), at, float(own.std()), noise, len(gaps), kind)
    if not agreement.holds:
        return (
            ", which steps token by token, is not what its forward computes of the whole "
            f"text: {agreement}. What tells single tokens from prompts, as a hook may, cannot be decoded in "
            "blocks; use its own generate."
        )
    if not all(map(torch.equal, out.scores, out.logits)):
        return " does more than its forward: it changes logits. Use its own generate."
    return None


GENERATE = Trial(
    _find_in_generate, "its own generate", " cannot be tried ({error}). verify=False decodes without."
)


def _kept(width: int) -> tuple[int, ...]:
    """Accepted rows of each block: as in decoding, the next block overwrites the others."""
    return min(2, width), width, 1, min(3, width)


def _ids(vocab: int, rows: int, length: int) -> Tensor:
    """Random ids [rows, length]; each row's beginning has every id below `SPECIAL`."""
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(0, vocab, (rows, length), generator=generator, device="cpu")
    for row in range(rows):
        places = torch.randperm(min(PROMPT, length), generator=generator, device="cpu")[:SPECIAL]
        ids[row, places] = torch.arange(SPECIAL, device="cpu") % vocab
    return ids.int()


def _own_text(twin: Any, ids: Tensor, length: int) -> Tensor:
    """``ids`` [1, T], continued to ``length`` tokens by the twin's own greedy `generate`."""
    new = length - ids.shape[1]
    plain = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    twin.generation_config = plain
    with torch.device("cpu"):
        return twin.generate(ids.long(), attention_mask=torch.ones_like(ids).long()).int()


def _unlike_forward(twin: Any, ids: Tensor) -> int | None:
    """The first position of a text of `_own_text` whose token is not the forward's argmax."""
    with torch.no_grad(), torch.device("cpu"):
        logits = _own_logits(twin, ids, PROMPT - 1)[:-1].float()
    chosen = logits.gather(1, ids[0, PROMPT:, None].long())[:, 0]
    far = torch.nonzero(logits.amax(dim=1) - chosen > 1e-3 * logits.std())
    return PROMPT + int(far[0]) if len(far) else None


def _sampled_otherwise(twin: Any, ids: Tensor) -> int | None:
    """The first position where the twin's own sampling changes logits beyond its options."""
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 20, "top_p": 0.9}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    twin.generation_config = GenerationConfig(max_new_tokens=4, pad_token_id=0, **options)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        out = twin.generate(ids.long(), attention_mask=torch.ones_like(ids).long())
    warp: Any = LogitsProcessorList([Temperature(0.5), TopK(20), TopP(0.9)])
    same = [torch.equal(score, warp(ids, own)) for score, own in zip(out.scores, out.logits, strict=True)]
    return None if all(same) else ids.shape[1] + same.index(False)


def compare(
    model: Any,
    skeleton: Target,
    ids: Tensor,
    cache: str,
    width: int,
    keeps: bool = True,
    lengths: bool = True,
) -> Agreement:
    """`Agreement` on rows of tokens [B, length], in blocks of ``width``; ``skeleton`` is the model's.

    ``keeps``: whether attributes stay as the previous pass wrote them, unlike in compiled programs.
    ``lengths``: whether differences between the model's own forwards of other lengths, and with its own
    cache, count as rounding. They do not for a hook, which may read the last position.
    """
    device, (rows, length) = model.device, ids.shape
    ids = ids.to(device)
    ends = length - sum(_kept(width)[:-1]) - width
    read = torch.tensor([ends - 3 * row % 7 for row in range(rows)], dtype=torch.int32, device=device)
    first, worst, position = int(read.min()) - 1, 0.0, -1
    with torch.inference_mode(False), torch.no_grad(), device:
        with _evaluating(model):
            own = [_own_logits(model, ids[row : row + 1], first) for row in range(rows)]
            again = [_own_logits(model, ids[:1, :-3], first)] if lengths else []
            if lengths and not skeleton.recurrent:  # some recurrent families' own cached forwards are wrong
                again.append(_own_cached_logits(model, ids[:1], first))
        noise = _noise(model, ids[:1], first)
        ours = _cached_logits(model, skeleton, ids, read, cache, width, keeps)
    for row, at, logits in ours:
        theirs = own[row][at - first : at - first + len(logits)].float()
        gaps = (logits.float() - theirs).abs().amax(dim=1).nan_to_num(nan=torch.inf)
        if float(gaps.max()) > worst or position < 0:
            worst, position = float(gaps.max()), at + int(gaps.argmax())
    noise = max(noise, *(float((other - own[0][: len(other)]).float().abs().max()) for other in again), 0.0)
    compared = sum(len(logits) for _, _, logits in ours)
    return Agreement(worst, position, float(own[0].float().std()), noise, compared, own[0].dtype)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """While open, modules are in evaluation mode for this thread alone; no flag changes."""
    if not any(part.training for part in model.modules()):
        yield
        return
    kind, here = cast(Any, nn.Module), threading.get_ident()
    seen: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def mode(module: nn.Module) -> bool:
        if "training" not in vars(module):  # TorchScript stores the flag elsewhere
            raise AttributeError("training")
        return seen.get(module, False) if threading.get_ident() == here else vars(module)["training"]

    def set_mode(module: nn.Module, value: bool) -> None:
        if threading.get_ident() == here and "training" in vars(module):
            seen[module] = value  # a forward that saves and restores a flag would store ours
        else:
            vars(module).update(training=value)

    with _patching:
        # TorchScript deletes the flag of a module that it loads.
        kind.training = property(mode, set_mode, lambda module: vars(module).pop("training", None))
        try:
            yield
        finally:
            del kind.training


def _own_logits(model: Any, ids: Tensor, first: int) -> Tensor:
    """The model's own logits [R, V] from position ``first`` on, without a cache."""
    keep = ids.shape[1] - first
    accepts = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    more = {"logits_to_keep": keep} if accepts else {}
    return model(input_ids=ids.long(), use_cache=False, **more).logits[0, -keep:]


def _own_cached_logits(model: Any, ids: Tensor, first: int) -> Tensor:
    """The model's own logits [R, V] from position ``first`` on, the tokens before it in its own cache."""
    before = model(input_ids=ids[:, :first].long(), use_cache=True)
    past = {CACHE: getattr(before, CACHE)}
    return model(input_ids=ids[:, first:].long(), **past).logits[0]


def _noise(model: Any, ids: Tensor, first: int) -> float:
    """The largest change of a copy's logits when each embedding changes by at most one rounding step."""
    copied = build_skeleton(model, model.config._attn_implementation)
    generator, tensors = torch.Generator("cpu").manual_seed(0), collect_tensors(copied, model, "")

    def round_off(module, args, out):
        steps = torch.randint(-1, 2, out.shape, generator=generator, device="cpu").to(out.device)
        return (out.float() * (1 + torch.finfo(out.dtype).eps * steps)).to(out.dtype)

    def logits() -> Tensor:
        return BoundWeights(copied).call(lambda: _own_logits(copied, ids, first), tensors, ())

    plain = logits()
    copied.get_input_embeddings().register_forward_hook(round_off)
    return float((logits() - plain).float().abs().max())


def _cached_logits(
    model: Any, skeleton: Target, ids: Tensor, read: Tensor, cache: str, width: int, keeps: bool
) -> list[tuple[int, int, Tensor]]:
    """(row, first position, logits [R, V]) of the last prompt token and of each block."""
    rows, length = ids.shape
    plan = DecodePlan(rows, length, width, width, cache=cast(Cache, cache), page_size=16)
    pair = Pair(skeleton, PlainProposer(), plan)
    params = collect_tensors(skeleton.model, model, "target.model.")
    table = None
    if cache == "paged":
        table = 1 + torch.arange(rows * plan.row_pages, dtype=torch.int32, device=ids.device).view(rows, -1)
    skeleton.reported_length = NONSENSE
    layers = pair.run(lambda pair: pair.target.start(plan), params)
    start, found = torch.zeros_like(read), []

    def forward(many: int, count: Tensor | None) -> Tensor:
        nonlocal layers
        at = positions(start, many)
        given = ids.gather(1, at.clamp(max=length - 1).long())
        with nullcontext() if keeps else restoring_attributes(pair):
            out = pair.run(lambda pair: pair.target(given, start, layers, (), table, count), params)
        layers = out.cache
        return out.logits

    while bool((start < read).any()):
        count = (read - start).clamp(min=0, max=LONGEST_CHUNK)
        logits = forward(min(whole_tiles(int(count.max())), LONGEST_CHUNK), count)
        ended = [row for row in range(rows) if count[row] and int(start[row] + count[row]) == int(read[row])]
        found += [(row, int(read[row]) - 1, logits[row, -1:]) for row in ended]
        start = start + count
    for kept in _kept(width):
        logits = forward(width, None)
        layers = tuple(layer.commit(torch.full_like(start, kept), None) for layer in layers)
        found += [(row, int(start[row]), logits[row]) for row in range(rows)]
        start = start + kept
    return found
