"""The plugin that vLLM calls in each of its processes: registers the names of our classes.

So ``spec_name: KVOffloadSpec`` and ``kv_connector: KVOffloadConnector`` need no module paths, unless
``VLLM_PLUGINS`` excludes kvoffload. The entry-point group is ``vllm.general_plugins``.
"""

from __future__ import annotations

from kvoffload.integrations.vllm.shared.logs import logger

_HOME = "kvoffload.integrations.vllm"


def register() -> None:
    """Register our names; vLLM imports a class when its name is used. Idempotent. Raises nothing.

    vLLM calls this even if kvoffload is not used, so an error is only logged.
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
