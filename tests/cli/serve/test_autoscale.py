"""The number of workers by the load: the policy alone, what it reads from a snapshot, and a service that does it."""

import dataclasses
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from octavo import Client
from octavo.cli.errors import CliError
from octavo.cli.serve.autoscale import (
    AutoscalePolicy,
    AutoscaleState,
    Demand,
    demand_of,
    next_state,
    policy_of,
    refused,
)
from octavo.cli.settings.groups import ServeSettings
from octavo.v1 import load_pb2 as pb
from tests.support.services.service import environment, serve, wait_for

POLICY = AutoscalePolicy(floor=1, ceiling=8, queue_s=1.0, usage=0.8, up_s=10.0, down_s=100.0)


def demand(num_workers: int, *, queue_s: float = 0.0, usage: float = 0.5) -> Demand:
    return Demand(num_workers=num_workers, queue_s=queue_s, usage=usage)


def wanted(state: AutoscaleState, seen: Demand, now_s: float = 1000.0, policy: AutoscalePolicy = POLICY) -> int:
    return next_state(policy, state, seen, now_s).wanted


@pytest.mark.parametrize(
    ("seen", "number"),
    [
        (demand(4), 4),
        (demand(4, usage=0.8), 4),
        (demand(4, usage=0.81), 5),
        (demand(4, usage=1.0), 5),
        (demand(4, queue_s=1.1), 5),
        (demand(4, queue_s=5.0), 6),
        (demand(4, queue_s=math.inf), 6),
        (demand(0, queue_s=9.0), 4),  # nobody serves it: nothing is known
    ],
)
def test_pressure_asks_for_as_many_as_would_bear_it(seen: Demand, number: int) -> None:
    assert wanted(AutoscaleState(wanted=4), seen) == number


def test_floor_and_ceiling_hold_whatever_is_seen() -> None:
    assert wanted(AutoscaleState(wanted=8), demand(8, queue_s=99)) == 8
    assert wanted(AutoscaleState(wanted=7), demand(7, queue_s=99)) == 8
    assert wanted(AutoscaleState(wanted=1), demand(1, usage=0)) == 1
    narrow = dataclasses.replace(POLICY, floor=2, ceiling=3)
    assert wanted(AutoscaleState(wanted=9), demand(9), policy=narrow) == 3
    assert wanted(AutoscaleState(wanted=1), demand(1), policy=narrow) == 2


def test_no_more_are_asked_for_until_those_have_come_and_a_while_has_passed() -> None:
    state = next_state(POLICY, AutoscaleState(wanted=2), demand(2, queue_s=2), 1000.0)
    assert state == AutoscaleState(wanted=3, changed_s=1000.0)
    assert wanted(state, demand(2, queue_s=9), 1500.0) == 3  # the third still loads
    assert wanted(state, demand(3, queue_s=2), 1009.0) == 3
    assert wanted(state, demand(3, queue_s=2), 1010.0) == 4


def test_one_goes_after_a_quiet_while_and_the_next_after_another() -> None:
    state, seen, gone = AutoscaleState(wanted=4, changed_s=0.0), demand(4, usage=0.1), []
    for now_s in range(1000, 1400):
        after = next_state(POLICY, state, dataclasses.replace(seen, num_workers=state.wanted), float(now_s))
        gone += [now_s] * (after.wanted < state.wanted)
        state = after
    assert gone == [1100, 1201, 1302]
    assert state.wanted == 1


def test_a_moment_of_work_begins_the_quiet_anew() -> None:
    state = next_state(POLICY, AutoscaleState(wanted=2), demand(2, usage=0.1), 1000.0)
    assert state.quiet_since_s == 1000.0
    state = next_state(POLICY, state, demand(2, usage=0.5), 1050.0)
    assert state.quiet_since_s is None
    assert wanted(next_state(POLICY, state, demand(2, usage=0.1), 1051.0), demand(2, usage=0.1), 1101.0) == 2


def test_none_goes_where_the_others_would_be_busy() -> None:
    """Two at 35 % are one at 70 %, which is near to what asks for another: it would flap."""
    for share, is_quiet in ((0.35, False), (0.25, True)):
        state = next_state(POLICY, AutoscaleState(wanted=2), demand(2, usage=share), 1000.0)
        assert (state.quiet_since_s is not None) == is_quiet


def test_what_was_learned_outlives_a_refusal() -> None:
    """How patient it has to be with workers that are soon missed, and for how long it was quiet."""
    before = AutoscaleState(wanted=2, changed_s=900.0, quiet_since_s=None, left_s=900.0, patience=2.0)
    asked = next_state(POLICY, before, demand(2, queue_s=2), 1000.0)
    assert (asked.wanted, asked.patience) == (3, 4.0)
    after = refused(before, asked, size=2, now_s=1000.5)
    assert after == dataclasses.replace(before, refused_s=1000.5, refused=3)
    quiet = AutoscaleState(wanted=2, changed_s=0.0, quiet_since_s=850.0)
    asked = next_state(POLICY, quiet, demand(2, usage=0.1), 1000.0)
    assert asked.wanted == 1
    after = refused(quiet, asked, size=2, now_s=1000.5)
    assert after == dataclasses.replace(quiet, refused_s=1000.5)
    assert wanted(after, demand(2, usage=0.1), 1010.4) == 2
    assert wanted(after, demand(2, usage=0.1), 1010.5) == 1


def test_a_refused_number_is_asked_for_again_after_a_while_and_by_half_the_step() -> None:
    state, seen, asked = AutoscaleState(wanted=4), demand(4, queue_s=99, usage=2.0), list[tuple[int, int]]()
    for now_s in range(1000, 1050):
        after = next_state(POLICY, state, seen, float(now_s))
        if after.wanted > state.wanted:
            asked.append((now_s, after.wanted))
            state = refused(state, after, size=4, now_s=float(now_s))
        else:
            state = after
    assert asked == [(1000, 8), (1010, 6), (1020, 5), (1030, 5), (1040, 5)]


def test_a_floor_that_cannot_be_had_is_not_asked_for_at_each_look() -> None:
    """As where an operator has drained a worker, and others have taken its place on the cluster."""
    policy, asked = dataclasses.replace(POLICY, floor=3), list[int]()
    state = AutoscaleState(wanted=3)
    for now_s in range(1000, 1030):
        after = next_state(policy, state, demand(2), float(now_s))
        if after.wanted != 2:
            asked.append(now_s)
            state = refused(state, after, size=2, now_s=float(now_s))
        else:
            state = after
    assert asked == [1000, 1010, 1020]


def test_a_snapshot_is_read_by_model_and_only_workers_that_take_requests_count() -> None:
    def worker(model: str, condition: "pb.WorkerCondition.ValueType", **given: int) -> pb.WorkerSnapshot:
        blocks = pb.KvBlocks(num_blocks=100, num_active=given.pop("active", 0), num_cached=50)
        return pb.WorkerSnapshot(model=model, condition=condition, blocks=blocks, max_num_seqs=10, **given)

    ready, lost = pb.WORKER_CONDITION_READY, pb.WORKER_CONDITION_LOST
    snapshot = pb.WatchLoadResponse(
        workers=[
            worker("a", ready, active=60, num_running=2),
            worker("a", ready, active=20, num_running=4, num_waiting=12),
            worker("a", lost, active=100, num_waiting=50),
            worker("b", ready, num_running=9),
        ],
        models=[
            pb.ModelLoad(
                model="a", figures=pb.LoadFigures(finished_per_s=4.0, queue_s=pb.Percentiles(num_values=9, p95=0.5))
            ),
        ],
    )
    assert demand_of(snapshot, "a") == Demand(num_workers=2, queue_s=3.0, usage=0.4)
    assert demand_of(snapshot, "b") == Demand(num_workers=1, queue_s=0.0, usage=0.9)
    assert demand_of(snapshot, "c") == Demand(num_workers=0, queue_s=0.0, usage=0.0)


@pytest.mark.parametrize("text", ["4", "0:4", "4:1", "1:65", "a:b", "1:", ":4", "-1:4", "1:2:3", "1:" + 36 * "9"])
def test_bounds_that_are_none_are_refused_by_name(text: str) -> None:
    with pytest.raises(CliError) as refused:
        policy_of(ServeSettings(autoscale=text))
    assert refused.value.what == "bad value for --autoscale"
    assert repr(text) in refused.value.numbers


def test_more_workers_to_begin_with_than_there_may_be_are_refused() -> None:
    with pytest.raises(CliError) as refused:
        policy_of(ServeSettings(autoscale="1:2", workers=3))
    assert refused.value.numbers == "--workers is 3, and --autoscale 1:2 allows 2 at most"
    assert policy_of(ServeSettings(autoscale="1:3", workers=3)) is not None


def test_settings_are_the_policy() -> None:
    settings = ServeSettings(
        autoscale="2:5", autoscale_queue_s=3.0, autoscale_usage=0.5, autoscale_up_s=1.0, autoscale_down_s=7.0
    )
    expected = AutoscalePolicy(floor=2, ceiling=5, queue_s=3.0, usage=0.5, up_s=1.0, down_s=7.0)
    assert policy_of(settings) == expected
    assert policy_of(ServeSettings()) is None
    assert policy_of(ServeSettings(autoscale="1:8")) == AutoscalePolicy(floor=1, ceiling=8)


def test_a_service_grows_with_its_callers_and_shrinks_without_them(tmp_path: Path) -> None:
    """Eight outputs for workers that run two each; then none. No output is lost, and operators keep out."""
    flags = ("--runner=oracle", "--num-blocks=512", "--oracle-eos-every=1000000", "--oracle-step-delay-s=0.02")
    scale = ("--autoscale=1:3", "--autoscale-up-s=0", "--autoscale-down-s=2", "--max-num-seqs=2", "--page=off")
    got: list[int] = []

    def call(n: int) -> None:
        with Client(service.target) as client:
            got.append(len(client.complete(token_ids=[n + 1], max_tokens=150, output="token_ids").token_ids))

    with serve(tmp_path, *flags, *scale) as service:
        service.wait_until_supervised()
        assert len(service.load()) == 1
        callers = [threading.Thread(target=call, args=(n,)) for n in range(8)]
        for each in callers:
            each.start()
        wait_for(lambda: len(service.load()) == 3)
        command = [sys.executable, "-m", "octavo.cli.main", "scale", "2", f"--admin-port={service.admin_port}"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        assert "--autoscale 1:3 chooses the number of workers" in done.stderr
        for each in callers:
            each.join(120)
        assert got == [150] * 8
        wait_for(lambda: len(service.load()) == 1)
        assert "folio-chat: from 1 to " in service.log.read_text()
