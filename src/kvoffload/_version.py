"""The version of the package.

Reports contain the version. A sweep does not reuse results that another version of the package has stored.
"""

__version__ = "0.1.0"
