"""Reading server-sent events, and joining them, as a client does."""

from __future__ import annotations

import json
from typing import Any

import httpx

from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.formats import get_format


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The values of a whole stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def join_choice(
    events: list[dict[str, Any]],
    index: int,
    prompt: list[int],
    schema: RouteSchema,
    format_name: str = "vllm",
) -> tuple[list[int], RoutedExperts]:
    """Tokens and rows of one completion of a stream with token ids."""
    known, pieces = list(prompt), []
    parts = [c for event in events for c in event["choices"] if c["index"] == index]
    assert [p["finish_reason"] is not None for p in parts] == [False] * (len(parts) - 1) + [True]
    for part in parts:
        known += part["token_ids"]
        if part.get("routed_experts") is not None:
            start = part["routed_experts_start"]
            decode = get_format(format_name).decode
            pieces.append(decode(part["routed_experts"], schema, known, start))
    return known[len(prompt) :], RoutedExperts.concat(pieces)
