# SPDX-License-Identifier: Apache-2.0
"""What SGLang's log says of cumla's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from cumla._choices import Layers, log_layers
from cumla.mla.shape import PACKED

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("is_mla", "line"),
    [
        (True, "layers with MLA: mla_decode_bfloat16_swapped_boxes, mla_attention_bfloat16_boxes"),
        (False, "layers without a window: attention_decode_bfloat16_64_64_8, "),
    ],
)
def test_the_first_layer_of_a_form_logs_its_kernels(
    is_mla: bool, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.sglang.stub import stubbed

    monkeypatch.setattr("cumla._choices._said", set())
    caplog.set_level("INFO")
    with stubbed():
        from cumla.sglang.backend import Form
        from tests.sglang.server import STEPS, Server

        form = Form(4, 1, 576, 512, None) if is_mla else Form(4, 2, 64, 32, None)
        for _ in range(2):
            server = Server(is_mla)
            server.backend.init_forward_metadata(server.batch(*STEPS["prefill"][:3]))
            server.backend._step(form, 46)
    (record,) = [record for record in caplog.records if "attends in" in record.getMessage()]
    assert record.getMessage().startswith(f"cumla attends in {line}")
    assert record.name == "cumla.sglang"


@pytest.mark.parametrize("cache_format", [None, PACKED])
def test_the_page_has_the_line_of_sparse_mla(
    cache_format: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For the 16 heads that each of eight GPUs has."""
    monkeypatch.setattr("cumla._choices._said", set())
    caplog.set_level("INFO")
    layers = Layers(16, 1, "bfloat16", topk=2048, cache_format=cache_format)
    log_layers("cumla.sglang", {"layers with sparse MLA": layers})
    page = Path(__file__).parents[2] / "docs/integrations/sglang.md"
    assert caplog.messages[0] in page.read_text("utf-8").splitlines()
