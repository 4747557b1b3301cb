"""Recordings of a manager's calls, and their replay on a new manager (docs/formats.md)."""
