"""Check a record against a fresh forward pass of transformers over the same tokens.

Nothing of the engine takes part in it: no paged cache, no batching, no scheduler, transformers' own attention. Only
the watching of the routers is shared, and binding cross-checks that against what the experts receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from routebook.capture.capturer import Capturer
from routebook.capture.outputs import RoutedExpertsTensors
from routebook.engine.config import ModelConfig
from routebook.engine.model_loader import check_maker, load_plain, model_fingerprint
from routebook.errors import ModelMismatchError, SchemaMismatchError
from routebook.routes import Comparison, RoutedExperts, RouteSample, RouteSchema, compare

_MIN_ROWS = 64


class Verifier:
    """A plain transformers model that computes the rows of given tokens.

    Args:
        model: a folder, a hub id, or a bundled name.
        config: number format and device of the forward pass.

    Raises:
        ModelError: the model cannot be used.
    """

    def __init__(self, model: str, config: ModelConfig) -> None:
        self.name = model
        self._model = load_plain(model, config)
        self._vocab_size = int(self._model.config.get_text_config(decoder=True).vocab_size)
        self.fingerprint = model_fingerprint(self._model)
        self._capturer: Capturer | None = None

    def verify(
        self, samples: Iterable[RouteSample], *, order: bool = True
    ) -> Iterator[tuple[RouteSample, Comparison]]:
        """Compare every sample's rows with fresh ones, in order or as sets.

        Raises:
            ModelMismatchError: a sample was made by another model.
        """
        for sample in samples:
            self._check_model(sample)
            yield sample, compare(sample.record, self.rows(sample), order=order)

    def rows(self, sample: RouteSample) -> RoutedExperts:
        """Rows of the sample's span of positions, from one forward pass over all its tokens."""
        record = sample.record
        token_ids = torch.from_numpy(sample.token_ids[: record.stop].copy()).long()[None]
        capturer = self._bound(token_ids.shape[1])
        with torch.inference_mode(), capturer.armed(token_ids.shape[1]):
            self._model(input_ids=token_ids.to(self._model.device), use_cache=False)
        rows = RoutedExpertsTensors(capturer.snapshot().ids_TLK.cpu()).tolists()
        return RoutedExperts.from_rows(
            capturer.schema,
            rows.ids_TLK[record.start :],
            sample.token_ids,
            start=record.start,
        )

    def _bound(self, num_tokens: int) -> Capturer:
        """The capturer, bound anew when a longer sample needs a larger buffer."""
        if self._capturer is None or self._capturer.buffer.max_tokens < num_tokens:
            if self._capturer is not None:
                self._capturer.unbind()
            self._capturer = Capturer.bind(self._model, max(_MIN_ROWS, 2 * num_tokens))
        return self._capturer

    def _check_model(self, sample: RouteSample) -> None:
        check_maker(sample, self.name, self.fingerprint)
        largest = int(sample.token_ids.max(initial=0))
        if largest >= self._vocab_size:
            raise ModelMismatchError(
                f"the record has token id {largest}, model {self.name!r} has a vocabulary of"
                f" {self._vocab_size}; give the model that made it"
            )
        schema = self._bound(_MIN_ROWS).schema
        if sample.record.schema != schema:
            raise SchemaMismatchError(
                f"the record has {_describe(sample.record.schema)}, model {self.name!r} has"
                f" {_describe(schema)}; give the model that made it"
            )


def _describe(schema: RouteSchema) -> str:
    return f"{schema.num_layers} MoE layers, {schema.num_experts} experts, top-{schema.top_k}"
