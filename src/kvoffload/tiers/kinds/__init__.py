"""The kinds of tiers that users can ask for, one file each. Their contract is `tiers.spec.TierOptions`."""
