"""The version of this distribution, in one place."""

__version__ = "0.1.0"
