"""The engine: where keys and values live, and three-tier speculation that leaves the distribution unchanged."""

from .engine import Engine
from .generation import Generation, Result, Round
from .speculation.sampling import Sampling

__all__ = ["Engine", "Generation", "Result", "Round", "Sampling"]
