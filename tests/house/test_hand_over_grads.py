# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom in src/backend/cuda/weight_grad.cuh. Shown to fail: where a CTA gives stages
back to itself alone, the model stands still (the last test).
"""

from warps import STAGES, Named, Pair, Slots, relay

QUEUE, TOKENS, NUMBERS = 8, 4, 4


class Cta:
    def __init__(self, pair):
        self.pair = pair
        self.ring = Slots(STAGES, 2, 8 * (2 if pair.shares else 1))
        self.landed = Slots(STAGES, 4, 1)
        self.queue, self.tokens = Slots(QUEUE, 1, 15), Slots(TOKENS, 1, 4)
        self.numbers = Slots(NUMBERS, 1, 2)  # the empty ones of the first CTA count
        self.free, self.staged = [Named(5), Named(5)], [Named(5), Named(5)]

    def barriers(self):
        slots = self.ring, self.landed, self.queue, self.tokens, self.numbers
        return [*(b for s in slots for b in s.full + s.empty), *self.free, *self.staged]

    def warps(self):
        yield self.find()
        yield self.relay()
        yield from (self.gather(loads=warp == 0) for warp in range(4))
        yield from (self.consume(group) for group in (0, 1) for _ in range(4))
        yield from (self.send(group) for group in (0, 1))

    def find(self):
        known = given = 0
        for at, (k_blocks, *_) in enumerate(self.pair.tiles):
            for kb in range(max(1, k_blocks)):
                if known > given:
                    yield from self.tokens.put(given, True)
                    given += 1
                if kb == 0:
                    yield from self.queue.put(at, at)
                known += k_blocks > 0
            if self.pair.shares:
                yield from self.next_number(at)
        if known > given:
            yield from self.tokens.put(given, True)
        yield from self.queue.put(len(self.pair.tiles), None)

    def next_number(self, at):
        ctas = self.pair.ctas
        lead = ctas[0].numbers
        if self is ctas[0]:
            yield from lead.wait_empty(at)
            for cta in ctas:
                cta.numbers.full[at % NUMBERS].arrive()
        yield from self.numbers.wait_full(at)
        yield
        lead.empty[at % NUMBERS].arrive()

    def take(self, taken):
        at = yield from self.queue.take(taken)
        return None if at is None else self.pair.tiles[at]

    def relay(self):
        at = taken = 0
        while (tile := (yield from self.take(taken))) is not None:
            taken += 1
            for _ in range(tile[0]):
                yield from relay(self, at)
                at += 1

    def gather(self, loads):
        at = taken = 0
        while (tile := (yield from self.take(taken))) is not None:
            taken += 1
            k_blocks, held, together = tile
            for _ in range(k_blocks):
                yield from self.tokens.take(at)
                yield from self.ring.wait_empty(at)
                yield
                if loads:
                    self.ring.full[at % STAGES].arrive(0 if held else 2)
                    yield
                    for cta in [] if held else self.pair.ctas if together else [self]:
                        cta.ring.full[at % STAGES].land(1 if together else 2)
                self.landed.full[at % STAGES].arrive()
                at += 1

    def consume(self, group):
        at = taken = pieces = 0

        def stage():
            nonlocal pieces
            if pieces:
                yield from self.free[group].sync()
                yield
                self.staged[group].arrive()
                pieces -= 1

        tile = yield from self.take(taken)
        while tile is not None:
            for kb in range(tile[0]):
                yield from self.ring.wait_full(at)
                yield
                if kb > 0:
                    self.pair.release(self, at - 1)
                piece = 2 - pieces
                due = (2 * piece if tile[0] < 4 else 2 * piece + group if tile[0] < 8
                       else (2 * piece + group) * tile[0] // 4)
                if kb >= due:
                    yield from stage()
                at += 1
            taken += 1
            following = yield from self.take(taken)
            while pieces:
                yield from stage()
            if tile[0]:
                self.pair.release(self, at - 1)
            pieces, tile = 2, following
        while pieces:
            yield from stage()

    def send(self, group):
        self.free[group].arrive()
        taken = 0
        while (yield from self.take(taken)) is not None:
            taken += 1
            for _ in range(2):
                yield from self.staged[group].sync()
                yield from [None] * self.pair.random.randint(0, 12)
                self.free[group].arrive()


class GradPair(Pair):
    """A tile is (k-blocks, its m operand is there, both CTAs have the same m)."""

    def __init__(self, seed):
        super().__init__(seed)
        self.tiles = []
        for _ in range(self.random.randint(0, 9)):
            again = self.tiles and not self.shares and self.random.random() < 0.6
            k_blocks = self.tiles[-1][0] if again else self.random.choice((0, 1, 2, 3, 5, 9))
            self.tiles.append((k_blocks, again and k_blocks <= STAGES,
                               self.shares and self.random.random() < 0.8))
        self.ctas = [Cta(self), Cta(self)]


def test_all_warps_of_a_pair_end():
    for seed in range(240):
        assert GradPair(seed).ends(), f"seed {seed}"


def test_stages_given_back_to_one_cta_are_not_enough():
    def alone(pair, cta, at):
        cta.ring.empty[at % STAGES].arrive()

    pairs = [GradPair(seed) for seed in range(25)]
    for pair in pairs:
        pair.release = alone.__get__(pair)
    assert not all(pair.ends() for pair in pairs)
