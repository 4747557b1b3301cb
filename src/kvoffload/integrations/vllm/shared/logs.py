"""The logger of kvoffload inside vLLM."""

import logging

logger = logging.getLogger("vllm.kvoffload")
