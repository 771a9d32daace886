"""What experts that are spread over ranks hold and send, by formula. Nothing is run.

n ranks own the E experts of a layer; a token has k of them. A row is a hidden state. Forward sends a token
once to each rank that needs it and gets a row for each slot there; backward sends two rows for a token, x and
dy, and gets one for a slot. Factors, their gradients and moments lie with their experts: none is sent.
Numbers of rows and slots are not counted: 8 bytes a slot beside 2 H.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

FLOAT = 4  # bytes: factors and their gradients are float32


@dataclass(frozen=True)
class Experts:
    """Of a model. layers: those with experts; chosen: experts of a token; nbytes: of all packed experts;
    trained: numbers of the factors on them."""

    layers: int
    count: int
    chosen: int
    hidden: int
    float_bytes: int
    nbytes: int
    trained: int

    def owned(self, ranks: int) -> list[int]:
        """How many experts each rank has."""
        if not 1 <= ranks <= self.count:
            raise ValueError(
                f"expert_parallel_size is {ranks}, wanted 1 to {self.count}, the experts of a layer"
            )
        return [(r + 1) * self.count // ranks - r * self.count // ranks for r in range(ranks)]

    def held_bytes(self, ranks: int) -> int:
        """Of the rank with the most: ceil(E / n) / E of all."""
        return -(-self.nbytes * max(self.owned(ranks)) // self.count)

    def ranks_of_a_token(self, ranks: int) -> float:
        """How many other ranks a token goes to, if all sets of k experts are alike: for each rank one less
        the chance that it owns none of them."""
        none = [
            comb(self.count - own, self.chosen) / comb(self.count, self.chosen) for own in self.owned(ranks)
        ]
        return sum(1 - chance for chance in none) * (ranks - 1) / ranks

    def slots_of_a_token(self, ranks: int) -> float:
        """How many of its experts other ranks own."""
        return self.chosen * (ranks - 1) / ranks  # the mean over ranks, whether n divides E or not

    def sent_for_a_token(self, ranks: int, forwards: int = 1) -> float:
        """Bytes in all layers, sent to others in forward and backward. forwards: 2 where an eager checkpoint
        repeats it; a graph does not, nobody reads its result."""
        rows = (forwards + 2) * self.ranks_of_a_token(ranks) + (forwards + 1) * self.slots_of_a_token(ranks)
        return rows * self.layers * self.hidden * self.float_bytes

    def each_slot_alone(self, ranks: int, forwards: int = 1) -> float:
        """The bound of the former: every slot is sent for itself, (2 forwards + 3) k (n - 1) / n rows."""
        rows = (2 * forwards + 3) * self.chosen * (ranks - 1) / ranks
        return rows * self.layers * self.hidden * self.float_bytes

    def held_factors(self, ranks: int) -> int:
        """Numbers of the factors on the experts of the rank with the most."""
        return self.trained * max(self.owned(ranks)) // self.count

    def buffer_bytes(self, ranks: int, tokens: int) -> int:
        """Of an exchange in backward at most, whatever the routes are: rows out and in (x and dy), a row for
        each slot that is served and for each that comes home, the gradients of a layer's factors of one
        micro-batch."""
        if ranks == 1:
            return 0
        most = max(self.owned(ranks))
        rows = tokens * (4 + min(self.chosen, most) + self.chosen)
        factors = FLOAT * self.trained // self.layers * most // self.count
        return rows * self.hidden * self.float_bytes + factors
