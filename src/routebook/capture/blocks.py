"""What a forward pass shows of a model's MoE blocks: every top-k, every call of experts, and where.

Legend of shape suffixes: N = rows, E = experts, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from routebook.capture.adapters import find_adapter
from routebook.capture.interception import topk_scores
from routebook.errors import UncapturableError

Run = Callable[[nn.Module], object]
"""Runs one small forward pass of the model that it is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Ids `[N, K]` out of `num_experts`, chosen in the forward of the module at `path`."""

    path: str
    ids_NK: torch.Tensor
    num_experts: int
    output: int | None = None
    """Where the module's output holds the very tensor of the ids; None: it returns them altered or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsCall:
    """The experts module at `path` received `ids_NK`; None if its forward takes no ids."""

    path: str
    ids_NK: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """All of one forward pass, in the order in which it happened."""

    choices: list[Choice] = field(default_factory=list)
    experts: list[ExpertsCall] = field(default_factory=list)


def modules_on_path(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules from `model` down to `path`."""
    names = accumulate(path.split("."), lambda parent, child: f"{parent}.{child}") if path else ()
    return [model, *(model.get_submodule(name) for name in names)]


def describe(model: nn.Module, path: str) -> str:
    """Name a module for an error message."""
    return f"{path or 'the model'} ({type(model.get_submodule(path)).__name__})"


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds routed experts, told by its class name, as every family names them."""
    return type(module).__name__.endswith("Experts") and not isinstance(module, nn.ModuleList)


def takes_ids(experts: nn.Module) -> bool:
    """Whether an experts module is called as `(hidden, ids, weights)`."""
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature(type(experts).forward).parameters.values()
    return sum(parameter.kind in positional for parameter in parameters) >= 4  # self included


class BlockWatcher(TorchFunctionMode):
    """While entered, notes which module of `model` calls `topk` and what its experts receive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.observation = Observation()
        self._model = model
        self._running: list[str] = [""]
        self._open: list[tuple[Choice, torch.Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the ids of every top-k over the last axis of a matrix."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        scores_NE = topk_scores(func, args, kwargs)
        if scores_NE is not None:
            choice = Choice(
                path=self._running[-1],
                ids_NK=result[1].clone(),
                num_experts=scores_NE.shape[-1],
            )
            self._open.append((choice, result[1]))
        return result

    def watch(self, run: Run) -> Observation:
        """Run one forward pass without gradient and return what was seen."""
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._enter(path)).remove)
                stack.callback(module.register_forward_hook(self._leave(path)).remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(self)
            run(self._model)
            self._close("", None)
        return self.observation

    def _enter(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(path)
            if is_experts(module):
                ids_NK = _received_ids(module, args)
                self.observation.experts.append(ExpertsCall(path=path, ids_NK=ids_NK))

        return hook

    def _leave(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        adapter = find_adapter(modules_on_path(self._model, path))

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._close(path, output)
            if adapter is not None and adapter.outputs is not None:
                self.observation.choices.append(_returned_choice(path, adapter.outputs, output))
            left = self._running.pop()
            assert left == path, (left, path)

        return hook

    def _close(self, path: str, output: Any) -> None:
        """Take down the choices made in the forward of `path`, now that its output is known."""
        closed = [entry for entry in self._open if entry[0].path == path]
        self._open = [entry for entry in self._open if entry[0].path != path]
        self.observation.choices.extend(
            replace(choice, output=_place_in(output, ids_NK)) for choice, ids_NK in closed
        )


def _received_ids(experts: nn.Module, args: tuple[Any, ...]) -> torch.Tensor | None:
    if len(args) < 2 or not takes_ids(experts) or not isinstance(args[1], torch.Tensor):
        return None
    return args[1].clone()


def _place_in(output: Any, tensor: torch.Tensor) -> int | None:
    items = output if isinstance(output, tuple) else ()
    return next((place for place, item in enumerate(items) if item is tensor), None)


def _returned_choice(
    path: str, places: tuple[int, int], output: tuple[torch.Tensor, ...]
) -> Choice:
    scores_NE, ids_NK = (output[place] for place in places)
    return Choice(
        path=path, ids_NK=ids_NK.clone(), num_experts=scores_NE.shape[-1], output=places[1]
    )


def dry_run(model: nn.Module) -> None:
    """Run a few tokens through a causal language model of transformers."""
    model(input_ids=dry_run_tokens(model), use_cache=False)


def dry_run_tokens(model: nn.Module) -> torch.Tensor:
    """Return token ids `[1, N]`; N is no size of any weight, so that no axis is mistaken for rows.

    Raises:
        UncapturableError: the model has no embedding of token ids.
    """
    find_embedding = getattr(model, "get_input_embeddings", None)
    if find_embedding is None:
        raise UncapturableError(
            f"{type(model).__name__} has no get_input_embeddings; "
            "pass `run` to run a forward pass of it"
        )
    weight: torch.Tensor = find_embedding().weight
    sizes = {size for tensor in model.state_dict().values() for size in tensor.shape}
    num_tokens = next(n for n in range(11, 12 + len(sizes)) if n not in sizes)
    return (torch.arange(num_tokens, device=weight.device) * 7 + 1)[None] % weight.shape[0]
