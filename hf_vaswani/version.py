"""The version of the package, which help prints without loading it."""

__version__ = "0.1.0"
