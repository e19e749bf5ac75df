"""Algorithm 3 in plain Python, from the paper with the choices of the design notes; nothing from safari."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class PlainServer:
    """Lists in, lists out. `pairs[u, v]` is the distance when u and v were last seen together."""

    model: list[float]
    weights: Sequence[float]
    parameters: int
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)
    stand_ins: dict[int, list[int]] = field(default_factory=dict)

    def step(self, received: Mapping[int, Sequence[float]], cohort: Sequence[int]) -> None:
        """One round of the paper's rule."""
        arrived = sorted(received)
        for u in arrived:
            for v in arrived:
                self.pairs[u, v] = math.dist(received[u][: self.parameters], received[v][: self.parameters])
        self.stand_ins = {}
        if not arrived:
            return
        total = math.fsum(self.weights[i] for i in cohort)
        new = [0.0] * len(self.model)
        for client in cohort:
            if client in received:
                speakers = [client]
            else:
                known = [(self.pairs[i, client], i) for i in arrived if (i, client) in self.pairs]
                speakers = [min(known)[1]] if known else arrived
                self.stand_ins[client] = speakers
            for speaker in speakers:
                share = self.weights[client] / total / len(speakers)
                new = [n + share * x for n, x in zip(new, received[speaker], strict=True)]
        self.model = new
