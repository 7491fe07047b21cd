"""Metrics by vLLM's names, so that its dashboards and routers read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# vLLM's buckets, in seconds.
_LATER = (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, *_LATER, 160.0, 640.0, 2560.0)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, *_LATER)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
WHOLE += (480.0, 960.0, 1920.0, 7680.0)


class Metrics:
    """Counters of one server; each answer adds to them.

    Args:
        prefix: of every name, before a colon.
        model: the label ``model_name``.
    """

    def __init__(self, prefix: str, model: str):
        self._registry, self._prefix = CollectorRegistry(), prefix
        self._labels = {"model_name": model, "engine": "0"}
        self._first = self._made(Histogram, "time_to_first_token_seconds", buckets=FIRST)
        self._between = self._made(Histogram, "inter_token_latency_seconds", buckets=BETWEEN)
        self._whole = self._made(Histogram, "e2e_request_latency_seconds", buckets=WHOLE)
        counted = "prompt_tokens generation_tokens spec_decode_num_drafts spec_decode_num_draft_tokens"
        counted = [*counted.split(), "spec_decode_num_accepted_tokens"]
        self._counts = {name: self._made(Counter, name) for name in counted}
        self._ends = self._made(Counter, "request_success", more=("finished_reason",))
        self._places = self._made(Counter, "spec_decode_num_accepted_tokens_per_pos", more=("position",))

    def show(self, name: str, now: Callable[[], float]) -> None:
        """A figure that is asked for whenever somebody looks."""
        self._made(Gauge, name).set_function(now)

    def add(self, **counts: int) -> None:
        """Add to counters."""
        for name, count in counts.items():
            self._counts[name].inc(count)

    def gained(self, tokens: int, seconds: float, first: bool) -> None:
        """An answer has gained ``tokens``, so long after the last ones, or after the request came."""
        self.add(generation_tokens=tokens)
        for _ in range(1 if first else tokens):
            self._first.observe(seconds) if first else self._between.observe(seconds / tokens)

    def ended(self, why: str, seconds: float, rounds: list[int], drafted: int) -> None:
        """An answer has ended; ``rounds``: tokens that each of its rounds has kept."""
        self._whole.observe(seconds)
        self._ends.labels(finished_reason=why, **self._labels).inc()
        accepted = {"spec_decode_num_accepted_tokens": sum(rounds) - len(rounds)}
        if drafted:
            self.add(spec_decode_num_drafts=len(rounds), spec_decode_num_draft_tokens=drafted, **accepted)
        for place in range(max(rounds, default=1) - 1):
            kept = sum(count > place + 1 for count in rounds)
            self._places.labels(position=str(place), **self._labels).inc(kept)

    def text(self) -> bytes:
        """All metrics in Prometheus's form."""
        return generate_latest(self._registry)

    def _made(self, kind: Any, name: str, more: tuple[str, ...] = (), **options: Any) -> Any:
        text, names = name.replace("_", " "), [*self._labels, *more]
        made = kind(f"{self._prefix}:{name}", text, names, registry=self._registry, **options)
        return made if more else made.labels(**self._labels)
