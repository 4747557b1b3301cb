"""What vLLM calls in each of its processes when kvoffload is installed beside it: names, nothing else.

With it ``spec_name: KVOffloadSpec`` and ``kv_connector: KVOffloadConnector`` suffice. Entry-point group
``vllm.general_plugins``; ``VLLM_PLUGINS`` can leave it out, and then the module paths must be given.
"""

from __future__ import annotations

from kvoffload.integrations.vllm.logs import logger

_HOME = "kvoffload.integrations.vllm"


def register() -> None:
    """Tell vLLM our names; nothing is imported until one is used. Once more does nothing; raises nothing.

    vLLM calls this also where nobody uses kvoffload, so whatever goes wrong here is a line in the log.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        for factory, tell, name, module in (
            (OffloadingSpecFactory, OffloadingSpecFactory.register_spec, "KVOffloadSpec", "spec"),
            (KVConnectorFactory, KVConnectorFactory.register_connector, "KVOffloadConnector", "connector"),
        ):
            if name not in factory._registry:
                tell(name, f"{_HOME}.{module}", name)
    except Exception as error:
        logger.warning("kvoffload: not registered with vLLM: %s", error)
