# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom in src/backend/cuda/sm90/row_gemm.cuh and its parts. Shown to fail: with
loaders that meet as they once did, the model stands still (the last test), and where the sender
waits for thirds that tiles of few rows do not have; with kQueueReaders of the header one too low,
three kinds fail; without the decoders in kQueueReaders or kFull, kinds of coded weights
fail, and with decoders that take k-blocks of a tile in turn, not stages.
"""

import pytest
from warps import CONSUMERS, CTAS, HEADERS, NUMBERS, Barrier, Named, Pair, Slots, relay

QUEUE = HEADERS.find("tile_scheduler.cuh", r"class TileQueue : public SlotQueue<(\d+)>")
MEET = HEADERS.constant("row_producer.cuh", "kMeet", of="RowProducer")
ASK = HEADERS.find("row_producer.cuh", r"\bask = min\((\d+), p_\.k_blocks - 1\)")
WARP = 32  # threads
K_BLOCKS = (1, 2, 3, 5, 7, 8, 9, 12, 17, 21)


class Kind:
    """A configuration of the kernel: an epilogue, whether rows are gathered, and whether weights
    are coded. operand: bytes of codes in a stage, which those who multiply decode.
    """

    def __init__(self, header, epilogue, steps, gather, finished=False, tile=None, coded=False,
                 operand=None, **known):
        def constant(name):
            return HEADERS.constant("row_gemm_config.cuh", name, of="RowGemmConfig",
                                    kGather=gather, kFinished=finished, kCoded=coded,
                                    kBytesM=operand)

        self.steps = steps  # in which each piece moves, 0: at once
        self.finished = finished  # by a warpgroup of its own
        self.holds = any(steps)
        self.pieces = HEADERS.constant(header, "kPieces", of=epilogue) if self.holds else 0
        self.sends = None if finished else HEADERS.constant(header, "kSends", of=epilogue, **known)
        self.stages = (constant("kFewStages") if operand else
                       HEADERS.constant(header, "kStages", of=tile or epilogue))
        self.gathering, self.readers = constant("kGatherWarps"), constant("kQueueReaders")
        self.relays = constant("kRelay") != constant("kNoWarp")
        self.coded, self.decoders = coded, constant("kDecoders")
        self.turns = constant("kDecoderTurns")
        self.announces = bool(constant("kAnnounces"))
        self.full, self.landed = constant("kFull"), constant("kLanded")


def kinds():
    tall, gradient = "epilogue_tall.cuh", "epilogue_gradient.cuh"
    return {
        "up": Kind(tall, "StoreActivated", (2, 1), gather=True, tile="TallTile"),
        "up, keeping": Kind("epilogue.cuh", "StoreActivatedAndPre", (0, 2, 2), gather=True),
        "up, alternating": Kind(
            "epilogue_alternating.cuh", "StoreAlternating", (2,), gather=True),
        "down": Kind(tall, "StoreRows", (2, 1, 2, 1), gather=False, tile="TallTile"),
        "grad down": Kind(gradient, "HandOver", (0, 1), gather=True, finished=True),
    }


def coded_kinds():
    def kind(epilogue, parts, gather=True, **known):
        return Kind("epilogue_at_once.cuh", epilogue, (0,) * parts, gather, tile="AtOnce",
                    coded=True, **known)

    up, rows = "StoreActivatedAtOnce", "StoreRowsAtOnce"
    return {"up, coded": kind(up, 2, kKeeps=False), "up, keeping, coded": kind(up, 6, kKeeps=True),
            "down, coded": kind(rows, 4, gather=False), "grad down, coded": kind(rows, 4)}


def few_kinds():
    """Of few rows, whose second parts are never there."""
    def kind(epilogue, parts, gather, operand, **known):
        return Kind("epilogue_at_once.cuh", epilogue, (0,) * parts, gather, tile="AtOnce",
                    operand=operand, **known)

    # Where up is asked for no pre-activations, its pieces are those of a kernel without.
    made = {}
    for codes, operand in (("nibbles", 8 << 10), ("bytes", 16 << 10)):
        for keeps in (False, True):
            name = f"up{', keeping' * keeps}, few rows, {codes}"
            made[name] = kind("StoreActivatedAtOnce", 6 if keeps else 2, True, operand,
                              kKeeps=keeps)
        made[f"down, few rows, {codes}"] = kind("StoreRowsAtOnce", 4, False, operand)
    return made


KINDS = kinds() | coded_kinds() | few_kinds()


class Cta:
    def __init__(self, pair, rank):
        self.pair, self.rank, self.kind = pair, rank, pair.kind
        kind = self.kind
        self.gathering, self.pieces, self.finished = kind.gathering, kind.steps, kind.finished
        self.relays = kind.relays
        self.ring = Slots(kind.stages, kind.full, CONSUMERS * (CTAS if pair.shares else 1))
        self.landed = Slots(kind.stages, max(1, kind.landed), 1)
        self.codes = Slots(kind.stages, 1, 1)
        self.queue = Slots(QUEUE, 1, kind.readers)
        self.met, self.begun = Barrier(pair.meeting), Barrier(1)
        self.numbers = Slots(NUMBERS, 1, CTAS)  # the empty ones of the first CTA count
        self.copies, self.loads = [], True  # under way; whether more may be begun
        hand = (lambda: Barrier(4)) if self.finished else (lambda: Named(5))
        self.free, self.staged = [hand(), hand()], [hand(), hand()]

    def barriers(self):
        slots = self.ring, self.landed, self.codes, self.queue, self.numbers
        return [*(b for s in slots for b in s.full + s.empty), self.met, self.begun, *self.free,
                *self.staged]

    def warps(self):
        yield self.produce(loads=True)
        yield self.copy()
        yield self.deal()
        if self.relays:
            yield self.relay()
        yield from (self.produce(loads=False) for _ in range(self.gathering))
        for turn in range(self.kind.turns if self.kind.coded else 0):
            yield from (self.decode_tiles(turn) for _ in range(self.kind.decoders))
        yield from (self.consume(group) for group in (0, 1) for _ in range(CONSUMERS // 2))
        yield from (self.finish() for _ in range(4)) if self.finished else [self.send()]

    def produce(self, loads):
        meetings = at = taken = 0
        tile = yield from self.queue.take(taken)
        while tile is not None:
            for kb in range(self.pair.k_blocks):
                together = self.pair.shares and self.pair.together(tile)
                if loads and not together and kb % MEET == 0:
                    for cta in self.pair.ctas:
                        if cta is not self or self.pair.meeting == 2:
                            cta.met.arrive()
                            yield
                    yield from self.met.wait(meetings & 1)
                    meetings += 1
                yield from self.ring.wait_empty(at)
                yield
                if loads:
                    yield from self.load(at, together)
                else:
                    gathered = self.landed if self.relays else self.ring
                    gathered.full_at(at).arrive(threads=WARP)
                at += 1
                if loads and kb == 0:
                    self.begun.arrive()
                if kb == min(ASK, self.pair.k_blocks - 1):
                    taken += 1
                    following = yield from self.queue.take(taken)
            tile = following
        self.loads = self.loads and not loads

    def copy(self):
        """The copies that the loader has begun land in any order."""
        while self.loads or self.copies:
            yield
            if self.copies:
                barrier, loaded = self.copies.pop(self.pair.random.randrange(len(self.copies)))
                barrier.land(loaded)

    def load(self, at, together):
        """The weights of a stage, with bytes for both CTAs or this one, and rows not gathered."""
        self.weights().full_at(at).arrive(announced=2)
        if self.kind.coded and self.kind.announces:
            self.ring.full_at(at).arrive()
        yield
        for cta in self.pair.ctas if together else [self]:
            self.copies.append((cta.weights().full_at(at), 1 if together else 2))

    def weights(self):
        return self.codes if self.kind.coded else self.ring

    def decodes(self, at, turn):
        return at % self.kind.stages % self.kind.turns == turn

    def decode(self, at):
        yield from self.codes.wait_full(at)
        assert self.codes.full_at(at).phase == at // self.kind.stages + 1, "codes of another phase"
        yield
        self.ring.full_at(at).arrive()

    def decode_tiles(self, turn):
        at = taken = 0
        while (yield from self.queue.take(taken)) is not None:
            taken += 1
            for _ in range(self.pair.k_blocks):
                if self.decodes(at, turn):
                    yield from self.decode(at)
                at += 1

    def relay(self):
        at = taken = 0
        while (yield from self.queue.take(taken)) is not None:
            taken += 1
            for _ in range(self.pair.k_blocks):
                yield from relay(self, at)
                at += 1

    def deal(self):
        number, at, lead = 0, 0, self.pair.ctas[0].numbers
        while True:
            yield from self.queue.put(at, number if number < self.pair.tiles else None)
            if number >= self.pair.tiles:
                return
            yield from self.begun.wait(at & 1)
            if self.rank == 0:
                yield from lead.wait_empty(at)
                self.pair.number += 1
                for cta in self.pair.ctas:
                    cta.numbers.value[at % NUMBERS] = self.pair.number
                    cta.numbers.full_at(at).arrive()
            yield from self.numbers.wait_full(at)
            number = self.numbers.value[at % NUMBERS]
            yield
            lead.empty_at(at).arrive()
            at += 1

    def consume(self, group):
        # The piece of each step, and whether that begins or ends it.
        steps = [(piece, step == 0, step == count - 1)
                 for piece, count in enumerate(self.pieces) for step in range(count)]
        k_blocks, stride = self.pair.k_blocks, max(1, self.pair.k_blocks // max(1, len(steps)))
        at, next_step, due, half, held = 0, len(steps), 0, 0, None

        def hand_over():
            nonlocal half
            if self.finished:
                yield from self.free[group].wait(half & 1 ^ 1)
                half += 1
            else:
                yield from self.free[group].sync()
            yield

        def move():  # a step of what is held
            nonlocal next_step
            piece, begins, ends = steps[next_step]
            next_step += 1
            if not self.has(held, piece):
                return
            if begins:
                yield from hand_over()
            yield
            if ends:
                self.staged[group].arrive()

        taken = 0
        tile = yield from self.queue.take(taken)
        while tile is not None:
            outside = self.pair.outside(tile, self.rank, group)
            for kb in range(k_blocks):
                yield from self.ring.wait_full(at)
                yield
                if not outside and kb > 0:
                    self.pair.release(self, at - 1)
                if next_step < len(steps) and kb >= due:
                    yield from move()
                    due += stride
                if outside:
                    self.pair.release(self, at)
                at += 1
            taken += 1
            following = yield from self.queue.take(taken)
            while next_step < len(steps):
                yield from move()
            if not outside:
                self.pair.release(self, at - 1)
                yield
            if not outside or self.finished:
                for piece, count in enumerate(self.pieces):
                    if count == 0 and self.has(tile, piece):
                        yield from hand_over()
                        self.staged[group].arrive()
                next_step, due = 0, (stride + 1) // 2 - (group if stride > 1 else 0)
                held = tile
            tile = following
        while next_step < len(steps):
            yield from move()

    def has(self, tile, piece):
        """Of few rows there is no last third, which is a piece of one step, or second part."""
        last = self.pieces[piece] == 1 if self.kind.holds else piece % 2 == 1
        return self.finished or not last or (tile, self.rank) not in self.pair.low

    def send(self):
        for free in self.free:
            free.arrive()
        taken = 0
        while (tile := (yield from self.queue.take(taken))) is not None:
            taken += 1
            for i in range(2 * len(self.pieces)):
                group = i % 2
                if self.pair.outside(tile, self.rank, group) or not self.has(tile, i // 2):
                    continue
                yield from self.staged[group].sync()
                yield from [None] * self.pair.random.randint(0, 12)
                self.free[group].arrive()

    def finish(self):
        taken = half = 0
        while (yield from self.queue.take(taken)) is not None:
            taken += 1
            for _ in range(2):
                for staged in self.staged:
                    yield from staged.wait(half & 1)
                yield from [None] * self.pair.random.randint(0, 8)
                for free in self.free:
                    free.arrive()
                half += 1


class RowPair(Pair):
    def __init__(self, kind, seed, meeting):
        super().__init__(seed)
        self.kind, self.meeting = KINDS[kind], meeting
        self.k_blocks, self.tiles = self.random.choice(K_BLOCKS), self.random.randint(0, 9)
        self.number = 0
        self.outsiders = {(tile, rank, group) for tile in range(self.tiles) for rank in (0, 1)
                          for group in (0, 1) if self.random.random() < 0.25}
        self.low = {(tile, rank) for tile in range(self.tiles) for rank in (0, 1)
                    if self.random.random() < 0.4}
        self.alone = {tile for tile in range(self.tiles) if self.random.random() < 0.3}
        self.ctas = [Cta(self, rank) for rank in (0, 1)]

    def together(self, tile):
        """Whether both CTAs have the same features of different rows."""
        return tile not in self.alone

    def outside(self, tile, rank, group):
        """Whether none of the group's features of this tile lie in the matrix."""
        return (tile, rank, group) in self.outsiders


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_pieces_are_those_of_the_epilogue(kind):
    assert (sum(kind.steps), kind.sends or len(kind.steps)) == (kind.pieces, len(kind.steps))


@pytest.mark.parametrize("kind", KINDS)
def test_all_warps_of_a_pair_end(kind):
    for seed in range(80):
        assert RowPair(kind, seed, meeting=2).ends(), f"seed {seed}"


def test_one_arrival_a_meeting_is_not_enough():
    assert not all(RowPair("grad down", seed, meeting=1).ends() for seed in range(25))
