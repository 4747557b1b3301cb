"""The version of the package. Reports contain it, and stored results of a sweep depend on it."""

__version__ = "0.1.0"
