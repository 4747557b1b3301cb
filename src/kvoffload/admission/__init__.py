"""Admission rules, one file each. `core.admission.Admission` defines their interface."""
