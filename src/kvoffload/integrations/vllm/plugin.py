"""The plugin that vLLM calls in each of its processes if kvoffload is installed: it registers names.

With it ``spec_name: KVOffloadSpec`` and ``kv_connector: KVOffloadConnector`` are enough. Entry-point group
``vllm.general_plugins``; if ``VLLM_PLUGINS`` excludes it, the module paths must be given.
"""

from __future__ import annotations

from kvoffload.integrations.vllm.shared.logs import logger

_HOME = "kvoffload.integrations.vllm"


def register() -> None:
    """Register our names with vLLM; a class is imported when its name is used. Idempotent. Raises nothing.

    vLLM calls this even if kvoffload is not used, so an error here is only a line in the log.
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
