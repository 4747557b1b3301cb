"""Prefix caching for Hugging Face transformers: the KV of known prompts is loaded from a `KVCache`.

`PrefixCache.generate` takes the arguments of ``model.generate``. The module `model` reads the layout of a
model and refuses models that cannot be cached. The module `batch` loads and stores the KV of one batch.
"""

from kvoffload.integrations.transformers.batch import PrefixBatch
from kvoffload.integrations.transformers.model import kv_layout
from kvoffload.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["PrefixBatch", "PrefixCache", "kv_layout"]
