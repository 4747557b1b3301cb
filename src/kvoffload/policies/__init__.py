"""Eviction policies, one file each. Their contract is `core.policy`."""
