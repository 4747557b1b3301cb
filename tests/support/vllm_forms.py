"""Signatures of vLLM's interfaces in a version, from tests/vllm_interfaces/signatures.json."""

from __future__ import annotations

import json
from inspect import Parameter, Signature
from pathlib import Path

from kvoffload.integrations.vllm.shared.versions import NEWEST, OLDEST

SIGNATURES: dict[str, dict[str, dict[str, list[str]]]] = json.loads(
    Path(__file__).parents[1].joinpath("vllm_interfaces/signatures.json").read_text()
)
VERSIONS = [f"0.{number}" for number in range(OLDEST[1], NEWEST[1] + 1)]


def versions_since(oldest: tuple[int, int]) -> list[str]:
    """The known versions from this one on."""
    return VERSIONS[VERSIONS.index(f"{oldest[0]}.{oldest[1]}") :]


def forms(interface: str, version: str) -> dict[str, str]:
    """Member of a class or module -> its form in this version."""
    return {
        member: form
        for member, of in SIGNATURES[interface].items()
        for form, versions in of.items()
        if version in versions
    }


def signature(form: str) -> Signature:
    """Parse the signature of a recorded function; a recorded default has no value."""
    kind, parameters = Parameter.POSITIONAL_OR_KEYWORD, []
    for name in filter(None, form.partition("(")[2].rstrip(")").split(", ")):
        if name.startswith("**"):
            parameters.append(Parameter(name[2:], Parameter.VAR_KEYWORD))
        elif name.startswith("*"):
            if name != "*":
                parameters.append(Parameter(name[1:], Parameter.VAR_POSITIONAL))
            kind = Parameter.KEYWORD_ONLY
        else:
            default = ... if name.endswith("=") else Parameter.empty
            parameters.append(Parameter(name.rstrip("="), kind, default=default))
    return Signature(parameters)
