"""Samplings by name: pairs of pure functions, run by the server, that choose the clients of a round."""

from safari.sampling.clustered import clustered_similarity, clustered_size
from safari.sampling.registry import SAMPLINGS
from safari.sampling.sampling import Draw, Sampling, SamplingRound, State
from safari.sampling.simple import multinomial, uniform

__all__ = [
    "SAMPLINGS",
    "Draw",
    "Sampling",
    "SamplingRound",
    "State",
    "clustered_similarity",
    "clustered_size",
    "multinomial",
    "uniform",
]
