"""From a conversation to a prompt."""

from __future__ import annotations

import inspect
from typing import Any

import jinja2

from routebook.errors import RequestError

# What a template's own code may raise, given a conversation that it was not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


def render_chat(
    tokenizer: Any,
    template: str | None,
    messages: list[dict[str, str]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    options: dict[str, Any],
) -> list[int]:
    """Token ids of a conversation.

    Args:
        tokenizer: of transformers.
        template: a Jinja template.
        messages: with `role` and `content`.
        add_generation_prompt: end with what begins the model's message.
        continue_final_message: leave the last message open, to be continued.
        options: further variables of the template.

    Raises:
        RequestError: there is no template, or it does not take this conversation.
    """
    if template is None:
        raise RequestError(
            "the model's tokenizer has no chat template; start the server with --chat-template FILE,"
            " or use /v1/completions"
        )
    if add_generation_prompt and continue_final_message:
        raise RequestError("continue_final_message=true needs add_generation_prompt=false")
    taken = options.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    if taken:
        raise RequestError(f"chat_template_kwargs may not hold {min(taken)!r}")
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **options,
        )
    except _TEMPLATE_ERRORS as error:
        raise RequestError(f"the chat template refuses this conversation: {error}") from error
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids
