"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from routebook.server.protocol.base import Body, NoItems, OpenAIBody


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: NoItems = None

    def as_template_input(self) -> dict[str, str]:
        """As chat templates take it: with one text."""
        content = self.content or ""
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class ChatCompletionRequest(OpenAIBody):
    """A conversation to go on with."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: NoItems = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
