"""Plugin for vLLM (entry-point group ``vllm.general_plugins``): registers our classes in all of vLLM's
processes.

Users can then write ``spec_name: KVOffloadSpec`` and ``kv_connector: KVOffloadConnector`` without module
paths, unless ``VLLM_PLUGINS`` excludes kvoffload.
"""

from __future__ import annotations

from kvoffload.integrations.vllm.shared.logs import logger

_HOME = "kvoffload.integrations.vllm"


def register() -> None:
    """Register `KVOffloadSpec` and `KVOffloadConnector` in vLLM's factories. Idempotent. Raises nothing.

    vLLM imports a registered class only when a configuration names it. An error here is logged and not
    raised, because vLLM calls plugins in every engine, with or without kvoffload.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        for factory, add, name, module in (
            (OffloadingSpecFactory, OffloadingSpecFactory.register_spec, "KVOffloadSpec", "spec"),
            (KVConnectorFactory, KVConnectorFactory.register_connector, "KVOffloadConnector", "connector"),
        ):
            if name not in factory._registry:
                add(name, f"{_HOME}.{module}", name)
    except Exception as error:
        logger.warning("kvoffload: not registered with vLLM: %s", error)
