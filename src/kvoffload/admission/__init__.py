"""Admission rules, one file each. Their contract is `core.admission`."""
