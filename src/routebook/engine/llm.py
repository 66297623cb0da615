"""The offline interface: prompts in, completions with their routed experts out."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from tqdm import tqdm

from routebook.config import check_choice
from routebook.engine.config import EngineConfig
from routebook.engine.engine import Engine, PauseMode
from routebook.engine.outputs import RequestOutput
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.weights import Weights
from routebook.errors import RequestError
from routebook.routes import RoutedExperts, RouteSchema

Prompt = str | Sequence[int]


class LLM:
    """A mixture-of-experts model that tells which experts every token used.

    Args:
        model: a folder, a hub id, `tiny` for the bundled model, or a transformers model in memory.
        tokenizer: overrides the model's own.
        config: options of :mod:`routebook.engine.config`, flat: `dtype`, `block_size`, `max_num_seqs`, ...

    Raises:
        ModelError: the model cannot be used; the message says why.
        ConfigError: an option that cannot work.
    """

    def __init__(self, model: str | Any, *, tokenizer: Any | None = None, **config: Any) -> None:
        self.engine = Engine(model, EngineConfig.from_options(**config), tokenizer)

    @property
    def schema(self) -> RouteSchema:
        """Layers, experts and top-k of the model."""
        return self.engine.schema

    @property
    def fingerprint(self) -> str:
        """Tells these weights from others; see `model_fingerprint`."""
        return self.engine.served.fingerprint

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        records: Sequence[RoutedExperts | None] | None = None,
        forced: bool = False,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, texts or token ids, in the order given.

        A completion that was aborted is continued by giving all its tokens as the prompt and its record: the new
        record keeps the old rows, and the rows of later positions follow.

        Args:
            prompts: one prompt or several; a text or a sequence of token ids each.
            params: one for all, or one per prompt.
            records: for each prompt the record of an aborted run to continue, or None.
            forced: route the tokens that have such a row along it again; see :meth:`Engine.add_request`.
            progress: show a progress bar on standard error.

        Raises:
            RecordError: a record does not belong to its prompt or to this model.
            RequestError: a prompt or its parameters cannot be served; then nothing is generated at all.
        """
        self.engine.check_running()
        prompt_list = _prompt_list(prompts)
        params_list = _params_list(params, len(prompt_list))
        requests = [self._tokenize(i, prompt) for i, prompt in enumerate(prompt_list)]
        record_list = _record_list(records, len(prompt_list))
        for index, (token_ids, wanted) in enumerate(zip(requests, params_list, strict=True)):
            self._check(index, token_ids, wanted)
        for token_ids, wanted, record in zip(requests, params_list, record_list, strict=True):
            if record is not None:
                self.engine.check_continuation(token_ids, wanted, record, forced)
        ids: list[str] = []
        try:
            for token_ids, wanted, prompt, record in zip(
                requests, params_list, prompt_list, record_list, strict=True
            ):
                text = prompt if isinstance(prompt, str) else None
                takes = forced and record is not None
                ids.append(
                    self.engine.add_request(token_ids, wanted, text, earlier=record, forced=takes)
                )
        except BaseException:
            # An interrupt, say: nobody will wait for those that are queued already.
            self.engine.forget(ids)
            raise
        outputs = self._run(ids, progress)
        return [outputs[request_id] for request_id in ids]

    def update_weights(self, source: str | Weights, mode: str = "wait") -> int:
        """Replace the weights; see :meth:`Engine.update_weights`.

        Args:
            source: a folder, a hub id, a bundled name, or tensors by parameter name.
            mode: `wait`, `abort` or `keep`: what becomes of requests that are open.

        Raises:
            ConfigError: another mode.
            ModelError: the weights do not fit or are not there; then nothing has changed.
        """
        check_choice("mode", mode, tuple(known.value for known in PauseMode))
        return self.engine.update_weights(source, PauseMode(mode))

    def shutdown(self) -> None:
        """Stop the worker; see :meth:`Engine.shutdown`."""
        self.engine.shutdown()

    def restart(self) -> int:
        """Start the worker again, after a failure for instance; see :meth:`Engine.restart`."""
        return self.engine.restart()

    def check_integrity(self) -> None:
        """Recount blocks and rows; see :meth:`Engine.check_integrity`."""
        self.engine.check_integrity()

    def _run(self, ids: Sequence[str], progress: bool) -> dict[str, RequestOutput]:
        """Step until these prompts have ended; outputs of others, queued in the engine itself, stay there."""
        outputs: dict[str, RequestOutput] = {}
        others: list[RequestOutput] = []
        wanted = set(ids)
        try:
            with tqdm(total=len(ids), desc="generate", unit="prompt", disable=not progress) as bar:
                while len(outputs) < len(ids):
                    for output in self.engine.step():
                        if output.request_id in wanted:
                            outputs[output.request_id] = output
                            bar.update()
                        else:
                            others.append(output)
        finally:
            self.engine.forget(wanted - outputs.keys())
            self.engine.keep(others)
        return outputs

    def _tokenize(self, index: int, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return _integers(index, prompt)
        try:
            return self.engine.tokenize(prompt)
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from error

    def _check(self, index: int, token_ids: list[int], params: SamplingParams) -> None:
        try:
            self.engine.check_request(token_ids, params)
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from error


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"{prompts!r} is no prompt; give a text, token ids, or a list of those")
    items: list[Any] = _plain_list(prompts)
    is_one = bool(items) and not any(isinstance(item, Iterable) for item in items)
    return [items] if is_one else items


def _integers(index: int, prompt: Iterable[Any]) -> list[int]:
    """Token ids as Python integers; a number with a fraction or a digit in quotes is no token id."""
    try:
        return [operator.index(token_id) for token_id in _plain_list(prompt)]
    except TypeError as error:
        raise RequestError(
            f"prompt {index} is neither a text nor a sequence of token ids: {error}"
        ) from error


def _plain_list(values: Iterable[Any]) -> list[Any]:
    """A list of plain values, also of an array or a tensor."""
    tolist: Any = getattr(values, "tolist", None)
    return list(values) if tolist is None else list(tolist())


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling parameters for {count} prompts; give one, or one each"
        )
    return list(params)


def _record_list(
    records: Sequence[RoutedExperts | None] | None, count: int
) -> Sequence[RoutedExperts | None]:
    if records is None:
        return [None] * count
    if len(records) != count:
        raise RequestError(f"{len(records)} records for {count} prompts; give one each, or None")
    return records
