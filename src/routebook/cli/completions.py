"""How completions are shown in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routebook.engine.outputs import CompletionOutput, RequestOutput
    from routebook.engine.step import TokenLogprobs


def completion_lines(output: RequestOutput, tokenizer: Any | None) -> Iterator[str]:
    """The prompt with each of its completions, and log-probabilities where they were asked for.

    Without a tokenizer there is no text, and the generated token ids are shown.
    """
    for choice in output.choices:
        text = choice.text if tokenizer is not None else " ".join(map(str, choice.token_ids))
        yield f"[{output.request_id}.{choice.index}] {output.prompt or ''}{text}"
        yield from _logprob_lines(choice, tokenizer)


def _logprob_lines(choice: CompletionOutput, tokenizer: Any | None) -> Iterator[str]:
    for logprobs in choice.logprobs or ():
        yield f"    {_token_line(logprobs, tokenizer)}"


def _token_line(logprobs: TokenLogprobs, tokenizer: Any | None) -> str:
    sampled = f"{_name(logprobs.token_id, tokenizer):16} {logprobs.logprob:8.3f}"
    likeliest = ", ".join(f"{_name(t, tokenizer)} {logprob:.3f}" for t, logprob in logprobs.top)
    return f"{sampled}   likeliest: {likeliest}" if likeliest else sampled


def _name(token_id: int, tokenizer: Any | None) -> str:
    return str(token_id) if tokenizer is None else repr(tokenizer.decode([token_id]))
