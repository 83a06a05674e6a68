"""The end of a run: every fault is over, time passes, and what must be free again is free."""

from kvferry.transfer.types import Role, TransferKey
from tests.simulation.control import short
from tests.simulation.life import Life
from tests.simulation.world import World

STEP_SECONDS = 1.0
LONGEST_SECONDS = 200.0
"""More than every lease, timeout and grace period together."""


def work(world: World) -> bool:
    """One fair round: all that can happen happens once. Returns whether anything did."""
    worked = world.move_lanes()
    for letter in tuple(world.control.letters):
        if world.can_deliver(letter):
            world.deliver(letter)
            worked = True
    for channel, end in world.can_tell_lost():
        world.tell_lost(channel, end)
        worked = True
    for pair in world.pairs():
        if world.can_connect(*pair):
            world.connect(*pair)
            worked = True
    return look_around(world) or worked


def look_around(world: World) -> bool:
    """Every running worker takes a turn, hears what ended and is done with what it decoded."""
    worked = False
    for life in world.lives.values():
        if life.running:
            world.turn(life)
            worked = world.poll(life) > 0 or worked
            for key in tuple(life.engine.reading):
                world.free(life, key)
                worked = True
    return worked


def settle(world: World) -> None:
    """Let everything that is under way come to its end, and time pass while nothing else does."""
    until = world.clock + LONGEST_SECONDS
    while not is_over(world) and world.clock < until:
        if not work(world):
            world.pass_time(STEP_SECONDS)


def is_over(world: World) -> bool:
    return not world.wire.ops and all(
        life.pool.all_free and not life.engine.busy for life in world.lives.values() if life.running
    )


def check_settled(world: World, parties: dict[TransferKey, set[str]]) -> None:
    """Every attempt ended, and every page is free but those of which no proof can be had.

    Args:
        parties: names of the workers that take part in an attempt.
    """
    for life in world.lives.values():
        if life.running:
            _check_ended(world, life)
            _check_pages(world, life, parties)


def _check_ended(world: World, life: Life) -> None:
    engine = life.engine
    for side, left in (("sender", engine.offered), ("receiver", engine.wanted), ("reader", engine.reading)):
        if left:
            world.broken(f"{life} still waits as {side} for {', '.join(map(short, left))}")


def _check_pages(world: World, life: Life, parties: dict[TransferKey, set[str]]) -> None:
    life.pool.check_books()
    doubtful = 0
    for group, owners in enumerate(life.pool.owners):
        for slot, owner in enumerate(owners):
            if owner is not None:
                doubtful += 1
                if not _is_excused(world, life, owner.key, parties):
                    world.broken(f"{life} holds slot {slot} of group {group} for {short(owner.key)} for ever")
    if doubtful != sum(life.transceiver.quarantined_slots()):
        world.broken(f"{life} holds {doubtful} slots, says that {life.transceiver.quarantined_slots()} are in doubt")


def _is_excused(world: World, life: Life, key: TransferKey, parties: dict[TransferKey, set[str]]) -> bool:
    """Whether no proof can be had: the other end does not run, or saw a post fail and lives on."""
    others = [world.lives[name] for name in parties[key] if name != life.worker.name]
    return key in world.wire.unproven or any(other.alive and not other.running for other in others)


def finish(world: World, parties: dict[TransferKey, set[str]]) -> None:
    """End a run in three acts: faults are over, stopped workers go on, one side dies."""
    world.heal()
    settle(world)
    check_settled(world, parties)
    for life in world.lives.values():
        if life.alive and not life.running:
            world.go_on(life)
    settle(world)
    check_settled(world, parties)
    # Whatever is still in doubt is so because of a worker that lives: its end is proof.
    doomed = (
        Role.PREFILL
        if any(not life.pool.all_free for life in world.lives.values() if life.role is Role.DECODE)
        else Role.DECODE
    )
    for life in world.lives.values():
        if life.alive and life.role is doomed:
            world.crash(life)
    world.wire.unproven.clear()
    settle(world)
    check_settled(world, parties)
