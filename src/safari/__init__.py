"""SAFARI: federated learning that keeps training when the network loses most of the updates."""

from safari.version import __version__

__all__ = ["__version__"]
