"""The twenty-two planted bugs and the four negative controls: which tests notice them, and in which layer."""

from dataclasses import dataclass

MANAGER = "tests/blockmgr/test_mutants.py::test_"
SCHEDULER = "tests/worker/scheduler/test_scheduler_mutants.py::test_the_mutant_is_killed"
SIMULATION = "tests/sim/test_mutants.py::test_it_is_noticed"
PLANTED = "tests/faults/test_planted.py::test_a_planted_bug_is_noticed"
WALK = MANAGER + "a_walk_kills"
BENCH = "tests/faults/test_controls.py::test_"
SIM_CONTROL = "tests/sim/test_controls.py::test_it_reports"


@dataclass(frozen=True, slots=True)
class Mutant:
    """tests: `path::name`. layer: property, unit, scheduler or simulation."""

    number: str
    title: str
    layer: str
    tests: tuple[str, ...]


MUTANTS: tuple[Mutant, ...] = (
    Mutant("m1", "a block twice in the free list", "property", (WALK,)),
    Mutant("m2", "a block that is not there counts as usable", "scheduler", (PLANTED,)),
    Mutant("m3", "a request that can never fit stands before the others", "scheduler", (SCHEDULER,)),
    Mutant("m4", "eviction leaves the hash entry", "property", (WALK,)),
    Mutant("m5", "a hit of the whole prompt", "property", (WALK,)),
    Mutant(
        "m6",
        "the salt is not in the first hash",
        "property, simulation",
        (WALK, MANAGER + "m6_a_root_without_the_salt_is_seen", SIMULATION),
    ),
    Mutant("m7", "a hash that can be predicted", "unit", (MANAGER + "m7_a_predictable_hash_is_seen",)),
    Mutant("m8", "an abort frees blocks of a step in flight", "property, scheduler", (WALK, SCHEDULER)),
    Mutant("m9", "a late end is an assertion", "unit", (PLANTED,)),
    Mutant("m10", "a disconnect leaves its slot taken", "scheduler, simulation", (SCHEDULER, SIMULATION)),
    Mutant("m11", "preemption again and again while blocks are deferred", "scheduler", (SCHEDULER,)),
    Mutant("m12", "a row that is not a number is a token", "scheduler, simulation", (SCHEDULER, SIMULATION)),
    Mutant(
        "m13",
        "its blocks are cached",
        "property, scheduler",
        (WALK, MANAGER + "m13_tainted_blocks_that_return_through_a_child_are_seen", SCHEDULER),
    ),
    Mutant("m14", "what is held back for a stop string is measured in bytes", "unit", (PLANTED,)),
    Mutant("m15", "the prompt is echoed while a character is cut", "unit", (PLANTED,)),
    Mutant("m16", "a CancelledError escapes a handler", "simulation", (SIMULATION,)),
    Mutant("m17", "a process that lives is healthy", "unit", (PLANTED,)),
    Mutant("m18", "a frozen worker's epoch is forgotten", "simulation", (SIMULATION,)),
    Mutant("m19", "a router drops what it cannot route", "unit", (PLANTED,)),
    Mutant("m20", "deadlines by the wall clock", "unit", (PLANTED,)),
    Mutant("m21", "a stream's queue without a bound", "unit", (PLANTED,)),
    Mutant("m22", "an allocation that fails is half applied", "property", (WALK,)),
)

CONTROLS: dict[str, tuple[str, ...]] = {
    "a leak": (BENCH + "a_leaked_block_and_descriptor_are_reported", SIM_CONTROL),
    "a hung stream": (BENCH + "a_call_without_end_or_too_late_is_reported", SIM_CONTROL),
    "a changed byte": (BENCH + "a_changed_token_is_reported_also_of_a_victim", SIM_CONTROL),
    "an UNKNOWN status": (BENCH + "a_status_that_nobody_explains_is_reported", SIM_CONTROL),
}
