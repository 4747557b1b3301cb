"""The version: of the package, of reports, and of what replays of a sweep are compared by."""

__version__ = "0.1.0"
