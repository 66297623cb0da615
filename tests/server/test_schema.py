"""Requests made up from the server's own OpenAPI document: none is answered with a 5xx, and nothing is left of them.

`ROUTEBOOK_SCHEMA_CASES=10000 pytest tests/server/test_schema.py` does the long run.
"""

from __future__ import annotations

import os
from collections import Counter

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.conftest import running

CASES = int(os.environ.get("ROUTEBOOK_SCHEMA_CASES", "400"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = 15


@pytest.fixture(scope="module")
def small():
    """Completions are short, and few at once, so that no case takes long."""
    options = {"reference": False, "max_model_len": 24, "num_blocks": 64}
    with running(engine=options, max_queued=200) as server:
        yield server
        server.settle()


def test_no_made_up_request_is_answered_with_a_5xx(small):
    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == OPERATIONS
    seen: Counter[tuple[str, int]] = Counter()
    # The others take no body, so there is but one way to call them.
    with_body = [operation for operation in operations if operation.body]
    for operation in operations:
        num_cases = -(-CASES // (2 * len(with_body))) if operation.body else 1
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if operation.body or mode is GenerationMode.POSITIVE:
                _run(small, operation.as_strategy(generation_mode=mode), num_cases, seen)
        if not seen[operation.path, 200]:
            seen[operation.path, 200] += _plain(small, operation.path)
    answered = {path for path, status in seen if status == 200}
    assert answered == {operation.path for operation in operations}
    assert seen.total() >= CASES
    small.settle()


def _run(small, cases, num_cases: int, seen: Counter[tuple[str, int]]) -> None:
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=cases)
    def check(case) -> None:
        response = case.call(timeout=60)
        path = case.operation.path
        seen[path, response.status_code] += 1
        if path == "/pause":
            httpx.post(f"{small.url}/resume").raise_for_status()
        case.validate_response(response, checks=CHECKS)

    check()


def _plain(small, path: str) -> int:
    """A request that is right, where none of the made-up ones was."""
    bodies = {
        "/inference/v1/generate": {"token_ids": [5]},
        "/inference/v1/abort_requests": {"request_ids": []},
        "/v1/completions": {"prompt": "1"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "1"}]},
        "/generate": {"text": "1"},
        "/tokenize": {"prompt": "1"},
        "/detokenize": {"tokens": [5]},
        "/pause": {},
        "/update_weights": {"model_path": "tiny"},
    }
    body = bodies[path]
    answer = httpx.post(f"{small.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, (path, answer.text)
    if path == "/pause":
        httpx.post(f"{small.url}/resume").raise_for_status()
    return 1
