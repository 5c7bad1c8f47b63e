"""The version of this distribution; read as text by the build, so nothing may be imported here."""

__version__ = "0.1.0"
