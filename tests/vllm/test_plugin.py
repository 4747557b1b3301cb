"""vLLM's factories know our classes by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvoffload.integrations.vllm import KVOffloadConnector, KVOffloadSpec
from kvoffload.integrations.vllm.plugin import register
from support.vllm_needs import VERSION


def test_names_suffice() -> None:
    for _ in range(2):
        register()
    config: Any = {"spec_name": "KVOffloadSpec"}
    if VERSION < (0, 26):
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=config))
    assert OffloadingSpecFactory.get_spec_cls(config) is KVOffloadSpec
    assert KVConnectorFactory.get_connector_class_by_name("KVOffloadConnector") is KVOffloadConnector
