"""The identity of an SGLang engine that produces pages: SGLang's arguments, versions, device and weights.

Pages may be used only by an engine with the same *fingerprint*. Every argument of SGLang that
`producer_table` does not list is *bound*, which means that it is part of the fingerprint. The format of a
page, including the dtype, is part of each key instead (`pages`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffload._version import __version__
from kvoffload.errors import ConfigError
from kvoffload.integrations.sglang.pages import HostPages
from kvoffload.integrations.sglang.producer_table import (
    DUMMY,
    LOAD_FORMAT,
    RESOLVED,
    SEED,
    VARIABLES_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
)
from kvoffload.model.kv_bytes import snapshots
from kvoffload.model.weights import files_of, weights_identity
from kvoffload.transfer.engine import cpu_capability

_KEY_FORMAT = 1
"""Version of the format of keys and objects. Increment it when the keys or the bytes of an object change."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LIBRARIES = ("sglang", "torch", "triton", "flashinfer-python", "sgl-kernel", "sglang-kernel")


@dataclass(frozen=True)
class Producer:
    """The engine that computes pages.

    Attributes:
        facts: all parts of the fingerprint except the weights.
        models: path and revision of each model.
        download_dir: SGLang's cache of weights from the hub; empty for the default cache.
        identity: a name that the user gives to the weights. In the fingerprint for shared tiers this name
            replaces the files and commits of the weights.
        loads_adapters: True if requests may use LoRA adapters. The fingerprints do not include the contents
            of adapters.
    """

    facts: Mapping[str, Any]
    models: tuple[tuple[str, str], ...]
    download_dir: str
    identity: str
    loads_adapters: bool

    def fingerprint(self) -> str:
        """Return the fingerprint for tiers that only this machine uses."""
        weights = [[*model, *self._files_and_commits(*model)] for model in self.models]
        return _text({**self.facts, "weights": weights, "identity": self.identity})

    def shared_fingerprint(self, name: str) -> str:
        """Return the fingerprint for tiers that several machines share.

        Args:
            name: a name for the weights from the tier's options; empty for none. The fingerprint also
                includes `identity`.

        Raises: `ConfigError` if the weights have no name and cannot be identified otherwise.
        """
        names = [given for given in (name, self.identity) if given]
        identities = [] if names else [weights_identity(model, self.download_dir) for model, _ in self.models]
        return _text({**self.facts, "weights": identities, "names": names})

    def check_weights(self) -> None:
        """Raise `ConfigError` if the weights of a model cannot be identified, by files or by a commit of the
        hub.
        """
        if self.facts.get(f"sglang.{LOAD_FORMAT}") == DUMMY:
            return  # the seed determines the weights
        for model, revision in self.models:
            if not _COMMIT.fullmatch(revision) and not self._files_and_commits(model, revision):
                why = f"neither files nor a hub commit of the model {model!r} are found on this machine"
                why += ", so pages of older weights could be served"
                raise ConfigError(
                    "identity", None, f"{why}; allowed: a name of the weights; change it with them"
                )

    def _files_and_commits(self, model: str, revision: str) -> list[Any]:
        """Return the files of a local model, or the cached commits and the branch head of a hub model."""
        places = snapshots(model, self.download_dir)
        branches = {place.parent.parent / "refs" / (revision or "main") for place in places}
        heads = [branch.read_text().strip() for branch in sorted(branches) if branch.is_file()]
        return [
            *files_of(model),
            *sorted(place.name for place in places),
            *(f"head {head}" for head in heads),
        ]


def find_producer(storage_config: Any, pools: Mapping[str, HostPages], identity: str) -> Producer:
    """Return the producer of the running engine.

    Raises: `ConfigError` if SGLang's arguments are unknown and `identity` is empty, because otherwise pages
    of another configuration could be served.
    """
    arguments = server_arguments()
    if arguments is None and not identity:
        why = "SGLang's arguments are unknown in this process, so pages of another model could be served"
        raise ConfigError("identity", None, f"{why}; allowed: a name of the weights and the configuration")
    given = arguments or {}
    settings = {name: _plain(value) for name, value in given.items() if name not in WITHOUT_EFFECT}
    if given.get(LOAD_FORMAT) == DUMMY:
        settings[SEED] = given.get(SEED)
    facts = {
        "engine": "sglang",
        "kvoffload": __version__.rsplit(".", 1)[0],
        "keys": _KEY_FORMAT,
        "model_name": storage_config.model_name if arguments is None else None,
        "tp_size": storage_config.tp_size,
        "pp_size": storage_config.pp_size,
        "attn_cp_size": storage_config.attn_cp_size,
        "pages": {name: json.loads(pages.description) for name, pages in pools.items()},
        "libraries": {name: _version_of(name) for name in _LIBRARIES},
        "device": _device(),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("SGLANG_") and not VARIABLES_WITHOUT_EFFECT.fullmatch(name)
        },
        **{f"sglang.{name}": value for name, value in settings.items()},
    }
    models = [(str(given.get("model_path") or ""), str(given.get("revision") or ""))]
    if draft := given.get("speculative_draft_model_path"):
        models.append((str(draft), str(given.get("speculative_draft_model_revision") or "")))
    return Producer(
        facts,
        tuple(models) if arguments else (),
        str(given.get("download_dir") or ""),
        identity,
        bool(given.get("enable_lora")),
    )


def server_arguments() -> dict[str, Any] | None:
    """Return SGLang's arguments in this process; None if unknown.

    An argument has the value that the user has given, except the arguments in `RESOLVED`, which have the
    value that SGLang has derived from it.
    """
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments = get_server_args()
    except (ImportError, RuntimeError, ValueError, AttributeError):
        return None
    kind: Any = type(arguments)
    names = getattr(kind, "__dataclass_fields__", ()) or getattr(kind, "__struct_fields__", ())
    values = {name: getattr(arguments, name, None) for name in names}
    if resolve := getattr(arguments, "resolved_dict", None):
        resolved = resolve()
        values |= {name: resolved[name] for name in RESOLVED if name in resolved}
    return values or None


def _device() -> dict[str, str]:
    facts = {"machine": platform.machine()}
    torch: Any = sys.modules["torch"]  # SGLang has imported it
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return {
            **facts,
            "device": "cuda" if torch.version.hip is None else "hip",
            "capability": f"{major}.{minor}",
        }
    return {**facts, "device": "cpu", "instructions": cpu_capability()}


def _version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return repr(value)


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True, default=str)
