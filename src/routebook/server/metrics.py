"""Numbers for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from routebook.server.engine_client import EngineClient
from routebook.server.forms.base import Form
from routebook.server.job import Job

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Measured:
    """Times of one job, from its beginning on."""

    def __init__(self, metrics: Metrics) -> None:
        self._began = time.monotonic()
        self._metrics = metrics
        self._first: Histogram | None = metrics.first_event

    def first(self) -> None:
        """Something was sent."""
        if self._first is not None:
            self._first.observe(time.monotonic() - self._began)
            self._first = None

    def end(self, form: Form) -> None:
        """All was generated."""
        self._metrics.duration.observe(time.monotonic() - self._began)
        self._metrics.completion_tokens.inc(sum(form.num_completion_tokens.values()))


class Metrics:
    """What one application has done, in a registry of its own.

    Args:
        client: the engine, whose numbers are read when they are asked for.
        model_name: label of the model.
    """

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "routebook_http_requests",
            "HTTP requests answered",
            ("path", "status"),
            registry=self.registry,
        )
        self.jobs = Gauge(
            "routebook_jobs_open", "requests for generation under way", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "routebook_prompt_tokens", "tokens of prompts taken on", registry=self.registry
        )
        self.completion_tokens = Counter(
            "routebook_completion_tokens",
            "tokens of completions that were not aborted by their client",
            registry=self.registry,
        )
        self.first_event = Histogram(
            "routebook_time_to_first_event_seconds",
            "from a stream's beginning to its first event",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "routebook_generation_seconds",
            "from a request's beginning to its last token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._gauge("routebook_completions_open", "completions that wait or run").set_function(
            lambda: client.num_open
        )
        self._gauge("routebook_preemptions", "preemptions since the start").set_function(
            lambda: client.engine.scheduler.num_preemptions
        )
        self._gauge("routebook_weight_version", "version of the weights").set_function(
            lambda: client.engine.scheduler.weight_version
        )
        self._gauge("routebook_completions_held", "completions the engine holds").set_function(
            lambda: len(client.engine.scheduler.requests)
        )
        info = Gauge(
            "routebook_model_info", "the model that is served", ("model",), registry=self.registry
        )
        info.labels(model_name).set(1)

    def text(self) -> bytes:
        """All numbers, as Prometheus reads them."""
        return generate_latest(self.registry)

    @contextmanager
    def generating(self, job: Job) -> Iterator[Measured]:
        """A job is under way."""
        self.prompt_tokens.inc(job.num_prompt_tokens)
        self.jobs.inc()
        try:
            yield Measured(self)
        finally:
            self.jobs.dec()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)
