"""The kinds of tiers that users can configure, one file each. Their contract is `tiers.spec.TierOptions`."""
