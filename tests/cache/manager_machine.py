"""A machine that lives random lives of sequences, and after every step compares all tokens with a naive model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.cache.admission import PoolOptions
from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.errors import CapacityError, ConfigError, LocalProtocolError
from kvferry.cache.holds import Access, Hold
from kvferry.cache.layout import LifeCycleLayout, build_layout, build_static_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.planned_drops import DropPlan
from kvferry.cache.sequence import SequenceCache, SequenceState
from kvferry.cache.sizing import slot_floors
from kvferry.cache.spec import ModelSpec
from kvferry.cache.static_manager import StaticKVCacheManager
from tests.cache.naive import Hashes, NaiveEngine, NaiveSequence, prefix_hashes
from tests.cache.random_lives import LONGEST, SCOPES, STREAMS, Prompt, Serving, models, options, prompts, scopes


class Arrival(NamedTuple):
    """Pages a hold keeps, with the tokens that are, or will be, in them."""

    hold: Hold
    pages: list[tuple[LifeCycleLayout, int, int]]
    hashes: Hashes
    naive: NaiveSequence


def has(*states: SequenceState) -> Callable[[Any], bool]:
    """A rule's condition: there is a sequence in one of these states."""
    return lambda machine: any(naive.cache.state in states for naive in machine.sequences)


ACTIVE, SUSPENDED = SequenceState.ACTIVE, SequenceState.SUSPENDED


class ManagerMachine(RuleBasedStateMachine):
    """Every step changes the manager and the naive model alike; then all tokens of all sequences are compared."""

    @initialize(
        spec=models,
        tokens_per_block=st.integers(1, 4),
        options=options,
        static=st.sampled_from([False, False, False, True]),
        more=st.lists(st.integers(0, 30), min_size=8, max_size=8),
    )
    def start(
        self, spec: ModelSpec, tokens_per_block: int, options: PoolOptions, static: bool, more: list[int]
    ) -> None:
        if static:
            # With windows V1 refuses the policies that keep only what is inside them.
            options = replace(options, commit_policy="off" if options.commit_policy == "off" else "all_reusable")
        layout = (build_static_layout if static else build_layout)(spec, tokens_per_block=tokens_per_block)
        slots = [floor + extra for floor, extra in zip(slot_floors(layout), more, strict=False)]
        self.manager = (StaticKVCacheManager if static else KVCacheManager)(layout, slots, options=options)
        self.engine = NaiveEngine(self.manager)
        self.sequences: list[NaiveSequence] = []
        self.reads: list[Arrival] = []
        self.writes: list[Arrival] = []
        self.plans: list[DropPlan] = []
        self.committed: dict[ReuseScope, set[tuple[int, ...]]] = {scope: set() for scope in SCOPES}

    # ---- what must not change when something fails

    def books(self) -> list[Any]:
        manager = self.manager
        found: list[Any] = [
            manager.usage(),
            manager.unpromised(),
            sorted(manager.holds.open),
            len(manager.published.tree),
        ]
        for naive in self.sequences:
            s = naive.cache
            found += [s.state, s.committed, s.history, s.capacity, s.row, s.borrowed, s.reserved]
            found += [s.slots(group.id).tolist() for group in manager.layout.life_cycles]
            if s.state is SequenceState.ACTIVE:
                found += [manager.scratch.of(s.row, group.id).tolist() for group in manager.layout.life_cycles]
        for allocator in manager.allocators:
            everything = np.arange(allocator.num_slots, dtype=np.int32)
            found += [allocator.epochs(everything).tolist(), allocator.users().tolist()]
            found += [part.tolist() for part in allocator.publication(everything)]
            found += [allocator.next_victims(allocator.num_slots).tolist()]
        return found + [manager.probe(stream, scope) for stream in STREAMS for scope in SCOPES]

    def refused(self, before: list[Any]) -> None:
        assert self.books() == before, "what fails changes nothing"

    def of(self, data: st.DataObject, *states: SequenceState) -> NaiveSequence:
        return data.draw(st.sampled_from([naive for naive in self.sequences if naive.cache.state in states]))

    def active(self, data: st.DataObject) -> NaiveSequence:
        return self.of(data, ACTIVE)

    # ---- life

    @rule(
        prompt=prompts,
        scope=scopes,
        reserve=st.sampled_from([None, None, None, 1, 3, 6]),
        priority=st.sampled_from([35, 35, 0, 80, lambda ordinal, life_cycle: 100 - ordinal]),
        for_transfer=st.booleans(),
        resume=st.booleans(),
    )
    def create(
        self,
        prompt: Prompt,
        scope: ReuseScope,
        reserve: int | None,
        priority: Any,
        for_transfer: bool,
        resume: bool,
    ) -> None:
        naive = self.created(prompt, scope, reserve, priority, for_transfer)
        if naive is not None and resume:
            self.resumed(naive)

    def serve(self, prompt: Prompt, scope: ReuseScope, chunk: int, how: Serving) -> None:
        """The usual life of a request: match, compute the rest in chunks, publish, end."""
        naive = self.created(prompt, scope, None, 35, False)
        if naive is None or not self.resumed(naive):
            return
        while len(naive.tokens) < prompt.length and self.grown(naive, min(len(naive.tokens) + chunk, prompt.length)):
            self.computed(naive, 0, 0, how is not Serving.COMMIT_LATE, how is Serving.SNAPSHOTS)
        if how is Serving.COMMIT_LATE:
            self.commit(naive, len(naive.tokens), True)
        if how is not Serving.STAY_OPEN:
            self.ended(naive)

    # Most of what happens.
    serving = rule(prompt=prompts, scope=scopes, chunk=st.integers(1, 16), how=st.sampled_from(Serving))
    serve_one, serve_two, serve_three, serve_four = serving(serve), serving(serve), serving(serve), serving(serve)

    def created(
        self, cut: Prompt, scope: ReuseScope, reserve: int | None, priority: Any, for_transfer: bool
    ) -> NaiveSequence | None:
        prompt = cut.tokens[: cut.length]
        slots = None if reserve is None else (reserve,) * len(self.manager.layout.pool_groups)
        before, probed = self.books(), self.manager.probe(prompt, scope)
        try:
            sequence = self.manager.create_sequence(
                "s", slots, token_ids=prompt, scope=scope, priority=priority, for_transfer=for_transfer
            )
        except CapacityError:
            limit = self.manager.options.max_sequences
            assert reserve is not None or (limit is not None and len(self.sequences) >= limit)
            self.refused(before)
            return None
        reused = sequence.reused_tokens
        assert (sequence.committed, sequence.history, sequence.capacity) == (reused,) * 3
        refused = reserve is None and self.manager.promises.total.any() and not reused  # the pages are promised
        assert reused % self.manager.layout.tokens_per_block == 0 if for_transfer else refused or reused == probed
        assert self.was_committed(prompt[:reused], scope)
        self.sequences.append(NaiveSequence(sequence, scope, prompt[:reused], cut.tokens))
        self.sequences[-1].has_state = not (reused and for_transfer and self.manager.layout.recurrent)
        return self.sequences[-1]

    def was_committed(self, prefix: list[int], scope: ReuseScope) -> bool:
        n, start = len(prefix), tuple(prefix)
        return not n or any(tokens[:n] == start for tokens in self.committed[scope])

    @precondition(has(SUSPENDED))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.resumed(self.of(data, SUSPENDED))

    def resumed(self, naive: NaiveSequence) -> bool:
        before = self.books()
        try:
            naive.cache.resume()
        except CapacityError:
            self.refused(before)
        return naive.cache.state is ACTIVE

    @precondition(has(ACTIVE))
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        self.active(data).cache.suspend()

    @precondition(has(ACTIVE, SUSPENDED))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.ended(self.of(data, ACTIVE, SUSPENDED))

    def ended(self, naive: NaiveSequence) -> None:
        naive.cache.close()
        naive.cache.close()
        self.sequences.remove(naive)

    # ---- the step

    @precondition(has(ACTIVE))
    @rule(data=st.data(), grow=st.integers(-6, 14))
    def resize(self, data: st.DataObject, grow: int) -> None:
        naive = self.active(data)
        self.grown(naive, min(LONGEST, max(naive.cache.history, naive.cache.capacity + grow)))

    def grown(self, naive: NaiveSequence, capacity: int) -> bool:
        sequence, before = naive.cache, self.books()
        try:
            sequence.resize(capacity=capacity)
        except CapacityError:
            self.refused(before)
        except ConfigError:
            assert self.manager.options.window_scratch
            self.refused(before)
        else:
            assert sequence.capacity == capacity
            return True
        return False

    @precondition(has(ACTIVE))
    @rule(data=st.data(), rejected=st.integers(0, 5), grow=st.integers(0, 4), commit=st.booleans(), keep=st.booleans())
    def compute(self, data: st.DataObject, rejected: int, grow: int, commit: bool, keep: bool) -> None:
        """Compute all tokens that have room, accept some, and make them history by a commit or by a resize."""
        self.computed(self.active(data), rejected, grow, commit, keep)

    def computed(self, naive: NaiveSequence, rejected: int, grow: int, commit: bool, keep: bool) -> None:
        sequence = naive.cache
        room = sequence.capacity - sequence.history
        if not room or not self.can_compute(naive):
            return
        if self.manager.options.window_scratch:
            rejected = min(rejected, self.manager.options.max_rewind_tokens)
        accepted = max(1, room - rejected)
        start, end = sequence.history, sequence.history + accepted
        new = naive.prompt[start:end]
        rejects = [9] * (room - accepted)
        self.engine.compute(sequence, prefix_hashes([*naive.tokens, *new, *rejects], naive.scope))
        self.engine.write_state(sequence, prefix_hashes([*naive.tokens, *new], naive.scope)[-1])
        before = self.books()
        try:
            if commit:
                naive.append(new)
                self.commit(naive, end, keep)
            else:
                sequence.resize(capacity=min(LONGEST, sequence.capacity + grow), history=end)
                naive.append(new)
        except CapacityError:
            assert not commit
            self.engine.write_state(sequence, naive.hashes[-1])
            self.refused(before)

    def commit(self, naive: NaiveSequence, end: int, keep: bool) -> None:
        sequence = naive.cache
        sequence.commit(naive.tokens[sequence.committed : end], snapshot=keep)
        assert sequence.committed == end
        if not naive.finished:
            self.committed[naive.scope].add(tuple(naive.tokens[:end]))

    @precondition(has(ACTIVE))
    @rule(data=st.data(), left=st.integers(0, 6), keep=st.booleans())
    def commit_history(self, data: st.DataObject, left: int, keep: bool) -> None:
        """Commits that run behind history; refused while a transfer writes into a page of their tokens."""
        naive = self.active(data)
        sequence = naive.cache
        end = max(sequence.committed, sequence.history - left)
        before = self.books()
        try:
            self.commit(naive, end, keep)
        except LocalProtocolError:
            assert self.being_written(naive)
            self.refused(before)

    def being_written(self, naive: NaiveSequence) -> bool:
        return any(arrival.naive is naive for arrival in self.writes)

    @precondition(has(ACTIVE, SUSPENDED))
    @rule(data=st.data())
    def stop_committing(self, data: st.DataObject) -> None:
        naive = self.of(data, ACTIVE, SUSPENDED)
        naive.cache.stop_committing()
        naive.finished = True

    @rule(grow=st.lists(st.integers(0, 5), min_size=8, max_size=8), commits=st.booleans())
    def step(self, grow: list[int], commits: bool) -> None:
        """All that can compute do, and move on together, whatever pages they share."""
        able = [naive for naive in self.sequences if naive.cache.state is ACTIVE and self.can_compute(naive)][:8]
        ends = [naive.cache.capacity for naive in able]
        for naive in able:
            new = naive.prompt[naive.cache.history : naive.cache.capacity]
            self.engine.compute(naive.cache, prefix_hashes([*naive.tokens, *new], naive.scope))
        before = self.books()
        capacity = np.array([min(LONGEST, end + n) for end, n in zip(ends, grow, strict=False)], np.int64)
        try:
            self.manager.resize_many([n.cache for n in able], capacity=capacity, history=np.array(ends, np.int64))
        except CapacityError:
            self.refused(before)
            for naive in able:
                self.engine.write_state(naive.cache, naive.hashes[-1])
            return
        for naive, end in zip(able, ends, strict=True):
            naive.append(naive.prompt[len(naive.tokens) : end])
            if commits:
                self.commit(naive, end, False)

    def can_compute(self, naive: NaiveSequence) -> bool:
        """Its pages and its state are there, and nobody else writes into them."""
        return naive.has_state and naive.missing is None and not self.being_written(naive)

    @rule(data=st.data(), grow=st.lists(st.integers(-2, 6), min_size=8, max_size=8))
    def resize_many(self, data: st.DataObject, grow: list[int]) -> None:
        chosen = [naive.cache for naive in self.sequences if naive.cache.state is SequenceState.ACTIVE][:8]
        capacity = np.array([min(LONGEST, max(s.history, s.capacity + n)) for s, n in zip(chosen, grow, strict=False)])
        before = self.books()
        try:
            self.manager.resize_many(chosen, capacity=capacity.astype(np.int64))
        except (CapacityError, ConfigError):
            self.refused(before)

    @precondition(has(ACTIVE, SUSPENDED))
    @rule(data=st.data())
    def bad_calls(self, data: st.DataObject) -> None:
        naive = self.of(data, ACTIVE, SUSPENDED)
        sequence, before = naive.cache, self.books()
        calls: list[Any] = [
            lambda: sequence.commit([1] * (sequence.capacity - sequence.committed + 1)),
            lambda: sequence.resize(history=sequence.history - 1),
            lambda: sequence.resize(capacity=sequence.history - 1),
            lambda: sequence.commit([-1]),
            lambda: sequence.resume() if sequence.state is SequenceState.ACTIVE else sequence.suspend(),
            lambda: self.manager.create_sequence("s", token_ids=[1 << 31]),
        ]
        with pytest.raises((ConfigError, LocalProtocolError, CapacityError)):
            data.draw(st.sampled_from(calls))()
        self.refused(before)

    @rule(tokens=st.integers(1, LONGEST))
    def press(self, tokens: int) -> None:
        """A short-lived sequence takes what it can get, evicting cached pages."""
        try:
            hog = self.manager.create_sequence("hog")
        except CapacityError:
            return
        try:
            hog.resume()
            hog.resize(capacity=tokens)
        except CapacityError:
            pass
        hog.close()

    # ---- transfers

    def pages_of(self, sequence: SequenceCache, skip: int) -> list[tuple[LifeCycleLayout, int, int]]:
        return [
            (group, ordinal, int(slot))
            for group in self.manager.layout.life_cycles
            for ordinal, slot in enumerate(sequence.slots(group.id))
            if slot >= 0 and ordinal >= skip
        ]

    @precondition(has(ACTIVE))
    @rule(data=st.data(), length=st.integers(1, 30))
    def receive(self, data: st.DataObject, length: int) -> None:
        """Declare a prompt as history and let another worker write the pages of what was not matched."""
        naive = self.active(data)
        sequence, p = naive.cache, self.manager.layout.tokens_per_block
        start = len(naive.tokens)
        if naive.missing is not None or not sequence.capacity == start == sequence.committed < length or start % p:
            return
        if any(arrival.naive is naive for arrival in self.reads):
            return  # its state may be on its way
        before = self.books()
        try:
            sequence.resize(capacity=length, history=length)
        except (CapacityError, ConfigError):
            self.refused(before)
            return
        naive.append(naive.prompt[start:length])
        pages = sequence.pages(length, skip_blocks=start // p)
        hold = self.manager.hold(pages, Access.WRITE)
        naive.missing = start
        self.writes.append(Arrival(hold, self.pages_of(sequence, start // p), naive.hashes, naive))

    @precondition(has(ACTIVE))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        naive = self.active(data)
        if naive.missing is not None:
            return
        hold = self.manager.hold(naive.cache.pages(naive.cache.history), Access.READ)
        pages = [page for page in self.pages_of(naive.cache, 0) if not page[0].life_cycle.recurrent]
        self.reads.append(Arrival(hold, pages, naive.hashes, naive))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def release_read(self, data: st.DataObject) -> None:
        self.manager.release(self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1))).hold)

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def release_write(self, data: st.DataObject) -> None:
        """The bytes arrive, whatever has become of their sequence."""
        arrival = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        for group, ordinal, slot in arrival.pages:
            self.engine.receive(group, ordinal, slot, arrival.hashes)
        arrival.naive.missing = None
        arrival.naive.has_state = True
        self.manager.release(arrival.hold)
        with pytest.raises(LocalProtocolError):
            self.manager.release(arrival.hold)

    # ---- dropping

    @precondition(has(ACTIVE, SUSPENDED))
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        naive = self.of(data, ACTIVE, SUSPENDED)
        try:
            self.plans.append(naive.cache.plan_drop())
        except LocalProtocolError:
            return

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        plan = self.plans.pop(data.draw(st.integers(0, len(self.plans) - 1)))
        plan.drop()
        with pytest.raises(LocalProtocolError):
            plan.drop()

    @rule()
    def clear(self) -> None:
        before = self.books()
        if self.sequences:
            with pytest.raises(LocalProtocolError):
                self.manager.clear_reusable()
            self.refused(before)
            return
        self.manager.clear_reusable()
        assert [usage.cached for usage in self.manager.usage()] == [0] * len(self.manager.allocators)
        assert not len(self.manager.published.tree)

    # ---- always

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()
            for usage in self.manager.usage():
                assert usage.free + usage.cached + usage.held == usage.num_slots

    @invariant()
    def cursors_are_those_of_the_model(self) -> None:
        for naive in getattr(self, "sequences", []):
            assert naive.cache.history == len(naive.tokens)
            assert naive.cache.committed <= naive.cache.history <= naive.cache.capacity

    @invariant()
    def every_token_that_can_be_read_is_right(self) -> None:
        for naive in getattr(self, "sequences", []):
            self.engine.check(naive)
        for arrival in getattr(self, "reads", []):
            for group, ordinal, slot in arrival.pages:
                self.engine.check_block(group, ordinal, slot, arrival.hashes)

    def teardown(self) -> None:
        """After everything is closed and released, every slot is free or cached."""
        if hasattr(self, "manager"):
            for naive in self.sequences:
                naive.cache.close()
            for arrival in self.reads + self.writes:
                self.manager.release(arrival.hold)
            self.manager.check_integrity()
            assert all(usage.held == usage.reserved == usage.transferring == 0 for usage in self.manager.usage())
