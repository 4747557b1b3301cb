"""Eviction policies, a module for each. The contract is `core.policy`."""
