# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom: all warps of a pair of CTAs, each a list of steps between which any other may
run, in random order until all have ended or none can go on.

A kernel that stands still once in thousands of launches is not found by launching it. All numbers
of warps, slots and stages come from the kernels' headers.
"""

import random

from kernel_headers import Headers

HEADERS = Headers()
CONSUMERS = HEADERS.constant("tile_ring.cuh", "kConsumerWarps")  # of both groups
CTAS = HEADERS.constant("tile_scheduler.cuh", "kClusterSize")
NUMBERS = HEADERS.constant("tile_scheduler.cuh", "kSlots", of="WorkNumbers")


class Barrier:
    """An mbarrier; who waits sees only whether the phase of the other parity is under way, and
    yields the barrier, whose next phase may end that.
    """

    def __init__(self, count):
        self.count = self.left = count
        self.phase = self.bytes = 0  # bytes: announced and not here, or here and not announced
        self.waiting = []  # warps, each after the set of those that run

    def arrive(self, announced=0, threads=1):
        self.left -= threads
        self.land(-announced)

    def land(self, loaded):
        self.bytes -= loaded
        assert self.left >= 0
        if self.left == self.bytes == 0:
            self.phase += 1
            self.left = self.count
            for awake, warp in self.waiting:
                awake.add(warp)
            self.waiting.clear()

    def wait(self, parity):
        while self.phase % 2 == parity:
            yield self


class Named(Barrier):
    """bar.sync and bar.arrive: of all who take part."""

    def sync(self):
        phase = self.phase
        self.arrive()
        while self.phase == phase:
            yield self


class Slots:
    """A ring of barriers and values; each of its users counts for itself."""

    def __init__(self, slots, full, empty):
        self.full = [Barrier(full) for _ in range(slots)]
        self.empty = [Barrier(empty) for _ in range(slots)]
        self.value = [None] * slots

    def full_at(self, at):
        return self.full[at % len(self.full)]

    def empty_at(self, at):
        return self.empty[at % len(self.full)]

    def wait_full(self, at):
        return self.full_at(at).wait(at // len(self.full) & 1)

    def wait_empty(self, at):
        return self.empty_at(at).wait(at // len(self.full) & 1 ^ 1)

    def put(self, at, value):
        yield from self.wait_empty(at)
        self.value[at % len(self.full)] = value
        yield
        self.full_at(at).arrive()

    def take(self, at):
        yield from self.wait_full(at)
        value = self.value[at % len(self.full)]
        yield
        self.empty_at(at).arrive()
        return value


def relay(cta, at):
    """What has been gathered into a stage, to those who multiply."""
    yield from cta.landed.wait_full(at)
    yield
    cta.ring.full_at(at).arrive()


class Pair:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.shares = self.random.random() < 0.5  # the CTAs load for each other
        self.ctas = []

    def release(self, cta, at):
        """A stage is empty only when each CTA that loads into it has had it read."""
        for sharer in self.ctas if self.shares else [cta]:
            sharer.ring.empty_at(at).arrive()

    def ends(self):
        """Some warps are ten times as fast as others. Those that wait for a barrier have no turn.
        Still: thousands of turns, in which none has ended or moved a barrier.
        """
        warps = [warp for cta in self.ctas for warp in cta.warps()]
        speeds = {warp: self.random.choice((1, 1, 3, 10)) for warp in warps}
        awake, rounds, seen = set(warps), 0, None
        while speeds:
            turns = [warp for warp in warps if warp in awake for _ in range(speeds[warp])]
            for warp in self.random.choices(turns, k=16) if turns else ():
                if warp in awake:
                    try:
                        barrier = next(warp)
                    except StopIteration:
                        awake.remove(warp)
                        del speeds[warp]
                    else:
                        if barrier:
                            awake.remove(warp)
                            barrier.waiting.append((awake, warp))
            rounds += 1
            if turns and rounds % 400:
                continue
            barriers = [b for cta in self.ctas for b in cta.barriers()]
            now = len(speeds), [(b.phase, b.left, b.bytes) for b in barriers]
            if now == seen:
                return False
            seen = now
        return True
