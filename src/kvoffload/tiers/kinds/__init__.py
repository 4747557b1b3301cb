"""Kinds of tiers that users can configure, a module for each. The contract is `tiers.spec.TierOptions`."""
