"""Whatever fits the OpenAPI document, and what does not: never a status of 500 or more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from live_server import PATIENCE, LiveServer, live_server
from tiny_models import save_tiny_model

pytestmark = pytest.mark.slow

MODES = list(schemathesis.GenerationMode)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    models = tmp_path_factory.mktemp("models")
    folder = save_tiny_model(models / "llama", max_position_embeddings=64)
    with live_server(folder, kv_cache_dtype="int8") as live:
        yield live
        live.wait_until_idle()


@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
def test_no_server_error(server: LiveServer, mode: schemathesis.GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    num_operations = 0
    found: Any
    for found in document.get_all_operations():
        operation = found.ok()
        num_operations += 1

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
        def check(case: Any) -> None:
            response = case.call(timeout=PATIENCE)
            assert response.status_code < 500, f"{case.as_curl_command()}: {response.text}"

        # What takes no arguments cannot be called wrongly.
        with contextlib.suppress(Unsatisfiable):
            check()
    assert num_operations >= 10
