"""Plugin for vLLM (entry-point group ``vllm.general_plugins``): registers kvoffload's classes in all
processes of vLLM.

Therefore users can write ``spec_name: KVOffloadSpec`` and ``kv_connector: KVOffloadConnector`` without module
paths, unless ``VLLM_PLUGINS`` excludes kvoffload.
"""

from __future__ import annotations

from kvoffload.integrations.vllm.shared.logs import logger

_HOME = "kvoffload.integrations.vllm"


def register() -> None:
    """Register `KVOffloadSpec` and `KVOffloadConnector` in vLLM's factories. Idempotent.

    vLLM imports a registered class only when a configuration names it. An error in this function is logged
    instead of raised, because vLLM calls it in every engine, also in engines that do not use kvoffload.
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
