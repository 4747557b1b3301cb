"""Registered by name, in vLLM's own factories."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvoffload.integrations.vllm import KVOffloadConnector, KVOffloadSpec
from kvoffload.integrations.vllm.plugin import register


def test_names_suffice() -> None:
    for _ in range(2):
        register()
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "KVOffloadSpec"}) is KVOffloadSpec
    assert KVConnectorFactory.get_connector_class_by_name("KVOffloadConnector") is KVOffloadConnector
