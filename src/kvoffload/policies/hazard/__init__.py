"""``hazard``: the policy itself is `policy`, what it learns from stands beside it."""
