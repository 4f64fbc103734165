# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom in src/backend/cuda/sm90/weight_grad.cuh, and where it finds the operand that
tiles have in common. Shown to fail: where a CTA gives stages back to itself alone, the model stands
still; where places are not walked back, or a single k-block's are, operands are lost.
"""

import random

from warps import CONSUMERS, CTAS, HEADERS, NUMBERS, Named, Pair, Slots, relay

STAGES = HEADERS.constant("weight_grad_copies.cuh", "kStages", of="GradConfig")
PIECES = HEADERS.constant("weight_grad_copies.cuh", "kPieces", of="GradConfig", kF32=False)
GATHERING = HEADERS.constant("weight_grad_tiles.cuh", "kGatherWarps")
READERS = HEADERS.constant("weight_grad_tiles.cuh", "kTileReaders")
QUEUE = HEADERS.find("weight_grad_tiles.cuh", r"class GradQueue : public SlotQueue<(\d+)>")
TOKENS = HEADERS.find("weight_grad_tiles.cuh", r"using Slots = SlotRing<(\d+), 4 \* kTileK>")


class Cta:
    def __init__(self, pair):
        self.pair = pair
        self.ring = Slots(STAGES, 2, CONSUMERS * CTAS)
        self.landed = Slots(STAGES, GATHERING, 1)
        self.queue, self.tokens = Slots(QUEUE, 1, READERS), Slots(TOKENS, 1, GATHERING)
        self.numbers = Slots(NUMBERS, 1, CTAS)  # the empty ones of the first CTA count
        self.free, self.staged = [Named(5), Named(5)], [Named(5), Named(5)]

    def barriers(self):
        slots = self.ring, self.landed, self.queue, self.tokens, self.numbers
        return [*(b for s in slots for b in s.full + s.empty), *self.free, *self.staged]

    def warps(self):
        yield self.find()
        yield self.relay()
        yield from (self.gather(loads=warp == 0) for warp in range(GATHERING))
        yield from (self.consume(group) for group in (0, 1) for _ in range(CONSUMERS // 2))
        yield from (self.send(group) for group in (0, 1))

    def find(self):
        known = given = runs = 0
        for at, (k_blocks, stays, _) in enumerate(self.pair.tiles):
            for kb in range(max(1, k_blocks)):
                if known > given:
                    yield from self.tokens.put(given, True)
                    given += 1
                if kb == 0:
                    yield from self.queue.put(at, at)
                known += k_blocks > 0 and kb >= stays
            if not any(stays for _, stays, _ in self.pair.tiles[at + 1:at + 2]):
                yield from self.next_number(runs)
                runs += 1
        if known > given:
            yield from self.tokens.put(given, True)
        yield from self.queue.put(len(self.pair.tiles), None)

    def next_number(self, at):
        ctas = self.pair.ctas
        lead = ctas[0].numbers
        if self is ctas[0]:
            yield from lead.wait_empty(at)
            for cta in ctas:
                cta.numbers.full_at(at).arrive()
        yield from self.numbers.wait_full(at)
        yield
        lead.empty_at(at).arrive()

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
        at = taken = copied = 0
        while (tile := (yield from self.take(taken))) is not None:
            taken += 1
            k_blocks, stays, together = tile
            for kb in range(k_blocks):
                if kb >= stays:
                    yield from self.tokens.take(copied)
                    copied += 1
                yield from self.ring.wait_empty(at)
                yield
                if loads:
                    self.ring.full_at(at).arrive(2)
                    yield
                    for cta in self.pair.ctas if together else [self]:
                        cta.ring.full_at(at).land(1 if together else 2)
                self.landed.full_at(at).arrive()
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
                piece = PIECES - pieces
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
            pieces, tile = PIECES, following
        while pieces:
            yield from stage()

    def send(self, group):
        self.free[group].arrive()
        taken = 0
        while (yield from self.take(taken)) is not None:
            taken += 1
            for _ in range(PIECES):
                yield from self.staged[group].sync()
                yield from [None] * self.pair.random.randint(0, 12)
                self.free[group].arrive()


class GradPair(Pair):
    """A tile is (k-blocks, of how many the n operand is there, both CTAs have the same m)."""

    def __init__(self, seed):
        super().__init__(seed)
        self.shares = True
        self.tiles = []
        for _ in range(self.random.randint(0, 9)):
            again = self.tiles and self.random.random() < 0.6
            k_blocks = self.tiles[-1][0] if again else self.random.choice((0, 1, 2, 3, 5, 9))
            together = self.tiles[-1][2] if again else self.random.random() < 0.8
            self.tiles.append((k_blocks, STAGES if again else 0, together))
        self.ctas = [Cta(self), Cta(self)]


def test_all_warps_of_a_pair_end():
    for seed in range(240):
        assert GradPair(seed).ends(), f"seed {seed}"


def test_stages_given_back_to_one_cta_are_not_enough():
    def alone(pair, cta, at):
        cta.ring.empty_at(at).arrive()

    pairs = [GradPair(seed) for seed in range(25)]
    for pair in pairs:
        pair.release = alone.__get__(pair)
    assert not all(pair.ends() for pair in pairs)


def operands_lost(seed, turns=lambda k_blocks: k_blocks > 1):
    """GradRing (weight_grad_tiles.cuh) over the tiles of random runs: how many k-blocks do not find
    what they multiply, or have it loaded into a place that may still be read."""
    draw = random.Random(seed)
    holds, used = [None] * STAGES, [-STAGES] * STAGES  # a place's k-block; when it was last read
    place, step, at, lost = 0, 1, 0, 0
    for run in range(30):
        k_blocks = draw.choice((1, 2, 3, 4, 5, 6, 9))
        for tile in range(draw.randint(1, 4)):
            if tile > 0:
                place = (place - step) % STAGES
                step = -step if turns(k_blocks) else step
            for i in range(k_blocks):
                block = run, k_blocks - 1 - i if tile % 2 else i
                if tile == 0 or i >= STAGES:
                    lost += at - used[place] < STAGES
                    holds[place] = block
                lost += holds[place] != block
                used[place] = at
                at += 1
                place = (place + step) % STAGES
    return lost


def test_operands_are_where_they_are_looked_for():
    assert not any(operands_lost(seed) for seed in range(1000))


def test_places_must_be_walked_back():
    assert any(operands_lost(seed, lambda k_blocks: False) for seed in range(10))
    assert any(operands_lost(seed, lambda k_blocks: True) for seed in range(10))
