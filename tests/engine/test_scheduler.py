from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import AGING_TOKENS_PER_SECOND, Load, Scheduler, Waiting

LONG = 256
IDLE = Load((), 0)


def scheduler(*rests: int, rows_max: int = 8, share_prefill: bool = True) -> Scheduler:
    """With requests 0, 1, ... of these rests in the queue, all of them since second 0."""
    made = Scheduler(rows_max, share_prefill, LONG)
    for request_id, rest in enumerate(rests):
        made.add(Waiting(request_id, rest, 0.0))
    return made


def test_short_rests_go_first() -> None:
    assert scheduler(200, 3, 100, 1).admit(IDLE, now=0.0) == [3, 1, 2, 0]


def test_equal_rests_go_in_the_order_of_their_arrival() -> None:
    queue = Scheduler(8, True, LONG)
    queue.add(Waiting(1, 5, 0.0))
    queue.add(Waiting(0, 5, 0.0))
    queue.add(Waiting(2, 5, 0.0))
    assert queue.admit(IDLE, now=3.0) == [0, 1, 2]


def test_who_waited_long_goes_before_who_is_short() -> None:
    queue = Scheduler(1, True, LONG)
    queue.add(Waiting(0, 1000, 0.0))
    queue.add(Waiting(1, 1, 1000 / AGING_TOKENS_PER_SECOND))
    assert queue.admit(IDLE, now=2.0) == [0]


def test_rows_that_prefill_and_rows_that_decode_both_take_a_place() -> None:
    assert len(scheduler(*[1] * 9, rows_max=8).admit(Load((1, 1), 3), now=0.0)) == 3
    assert scheduler(1, rows_max=8).admit(Load((1, 1), 6), now=0.0) == []


def test_who_is_admitted_leaves_the_queue() -> None:
    queue = scheduler(1, 2, 3, rows_max=2)
    assert queue.admit(IDLE, now=0.0) == [0, 1]
    assert len(queue) == 1
    assert queue.admit(IDLE, now=0.0) == [2]
    assert queue.admit(IDLE, now=0.0) == []


def test_one_long_rest_at_a_time_and_short_ones_beside_it() -> None:
    queue = scheduler(LONG + 1, LONG + 2, LONG, 1)
    assert queue.admit(IDLE, now=0.0) == [3, 2, 0]
    assert queue.admit(Load((LONG + 1,), 0), now=0.0) == []
    # What is left of the long one is short by now.
    assert queue.admit(Load((LONG,), 0), now=0.0) == [1]


def test_prompts_one_at_a_time_when_they_may_not_share() -> None:
    queue = scheduler(1, 2, share_prefill=False)
    assert queue.admit(Load((5,), 0), now=0.0) == []
    assert queue.admit(Load((), 3), now=0.0) == [0]
    assert queue.admit(Load((), 3), now=0.0) == [1]


def test_a_removed_request_is_never_admitted() -> None:
    queue = scheduler(1, 2)
    assert queue.remove(0)
    assert not queue.remove(0)
    assert not queue.remove(7)
    assert queue.admit(IDLE, now=0.0) == [1]
    assert not queue.remove(1)


@pytest.mark.parametrize(
    "waiting", [Waiting(0, 0, 0.0), Waiting(5, 1, 0.0)], ids=["no rest", "there already"]
)
def test_misuse_is_an_error(waiting: Waiting) -> None:
    queue = Scheduler(1, True, LONG)
    queue.add(Waiting(5, 1, 0.0))
    with pytest.raises(AssertionError):
        queue.add(waiting)


# --- a batch that is driven step by step -------------------------------------------------


STEP_SECONDS = 0.1
CHUNK = 128


@dataclass
class Job:
    id: int
    rest: int
    decode_steps: int
    since: float

    @property
    def long(self) -> bool:
        return self.rest > LONG


@dataclass
class Simulation:
    """What the engine does with the answers: rests become shorter, then rows decode, then end."""

    scheduler: Scheduler
    rows_max: int
    share_prefill: bool
    now: float = 0.0
    waiting: dict[int, Job] = field(default_factory=dict)
    prefilling: dict[int, int] = field(default_factory=dict)
    decoding: dict[int, int] = field(default_factory=dict)
    decode_steps: dict[int, int] = field(default_factory=dict)

    def arrive(self, job: Job) -> None:
        self.waiting[job.id] = job
        self.scheduler.add(Waiting(job.id, job.rest, job.since))

    def step(self) -> None:
        long_before = any(rest > LONG for rest in self.prefilling.values())
        load = Load(tuple(self.prefilling.values()), len(self.decoding))
        admitted = [self.waiting[i] for i in self.scheduler.admit(load, self.now)]
        self.check_order(admitted, long_before)
        for job in admitted:
            del self.waiting[job.id]  # raises for one that was admitted twice
            self.prefilling[job.id] = job.rest
            self.decode_steps[job.id] = job.decode_steps
        self.check_limits()
        self.run()

    def check_order(self, admitted: list[Job], long_before: bool) -> None:
        """Nobody is overtaken by one that came so much later that waiting outweighs its rest."""
        ids = {job.id for job in admitted}
        blocked = long_before or any(job.long for job in admitted)
        for job in admitted:
            for other in self.waiting.values():
                if other.id in ids or (other.long and blocked):
                    continue
                overtakes = job.since > other.since + other.rest / AGING_TOKENS_PER_SECOND
                assert not overtakes, f"{job} goes before {other}"

    def check_limits(self) -> None:
        assert len(self.prefilling) + len(self.decoding) <= self.rows_max
        assert sum(rest > LONG for rest in self.prefilling.values()) <= 1
        assert self.share_prefill or len(self.prefilling) <= 1
        assert len(self.scheduler) == len(self.waiting)
        # Nobody waits for nothing.
        assert self.prefilling or self.decoding or not self.waiting

    def run(self) -> None:
        for job_id in [i for i, steps in self.decoding.items() if steps == 1]:
            del self.decoding[job_id]
        self.decoding = {i: steps - 1 for i, steps in self.decoding.items()}
        for job_id, rest in list(self.prefilling.items()):
            if rest > CHUNK:
                self.prefilling[job_id] = rest - CHUNK
            else:
                del self.prefilling[job_id]
                self.decoding[job_id] = self.decode_steps[job_id]
        self.now += STEP_SECONDS


jobs = st.lists(
    st.tuples(
        st.integers(0, 5),  # steps since the one before
        st.integers(1, 300) | st.integers(1, 4000),
        st.integers(1, 6),
    ),
    max_size=30,
)


@given(jobs=jobs, rows_max=st.integers(1, 5), share_prefill=st.booleans())
def test_everybody_is_served_within_the_limits(
    jobs: list[tuple[int, int, int]], rows_max: int, share_prefill: bool
) -> None:
    simulation = Simulation(Scheduler(rows_max, share_prefill, LONG), rows_max, share_prefill)
    for job_id, (pause, rest, decode_steps) in enumerate(jobs):
        for _ in range(pause):
            simulation.step()
        simulation.arrive(Job(job_id, rest, decode_steps, simulation.now))
    # As if all ran one after the other.
    steps = sum(-(-rest // CHUNK) + decode_steps for _, rest, decode_steps in jobs)
    for _ in range(steps):
        simulation.step()
    assert not simulation.waiting
    assert not simulation.prefilling
    assert not simulation.decoding


@given(rest=st.integers(1, 3000), rows_max=st.integers(1, 3), share_prefill=st.booleans())
def test_an_endless_stream_of_short_prompts_does_not_starve_a_long_one(
    rest: int, rows_max: int, share_prefill: bool
) -> None:
    simulation = Simulation(Scheduler(rows_max, share_prefill, LONG), rows_max, share_prefill)
    simulation.arrive(Job(0, rest, 1, 0.0))
    # Those that came before waiting outweighed the rest, each for two steps; then it is its turn.
    before = rest / AGING_TOKENS_PER_SECOND / STEP_SECONDS
    for job_id in range(1, int(2 * rows_max * (before + 1)) + 3 * rows_max):
        if 0 not in simulation.waiting:
            break
        for n in range(rows_max):
            simulation.arrive(Job(job_id * 10 + n, 1, 1, simulation.now))
        simulation.step()
    assert 0 not in simulation.waiting
