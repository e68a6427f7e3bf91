"""The registry: events in, decisions out; a worker that was given up stays given up."""

import msgspec
import pytest

from octavo.gateway.workers.decisions import Accept, Announce, AskTokenizer, Lose, Peer, Refuse, Watch
from octavo.gateway.workers.registry import GIVEN_UP, MAX_REMEMBERED, Registry, RegistryLimits
from octavo.gateway.workers.views import LostReason, WorkerState
from octavo.wire.bundle import BundleError, bundle_digest
from octavo.wire.messages import Heartbeat, TokenizerBundle
from tests.support.gateway.workers import FILES, capacity, card, register

ALICE, BOB, CAROL = (Peer(0, bytes([0, n])) for n in range(3))
E1, E2, E3 = ("1" * 32, "2" * 32, "3" * 32)
DIGEST = bundle_digest(FILES)


def new_registry(**limits: object) -> Registry:
    return Registry(RegistryLimits(**limits))  # type: ignore[arg-type]


def bundle(epoch: str) -> TokenizerBundle:
    return TokenizerBundle(epoch=epoch, digest=DIGEST, files=FILES)


def ready_registry(**limits: object) -> Registry:
    """With worker w0, epoch E1, at ALICE, ready since 0 s."""
    registry = new_registry(**limits)
    registry.on_register(ALICE, register("w0", E1), 0.0)
    registry.on_bundle(ALICE, bundle(E1))
    return registry


def lose(reason: LostReason, detail: str, *, incarnation: int = 1, worker_id: str = "w0") -> Lose:
    return Lose(incarnation=incarnation, worker_id=worker_id, reason=reason, detail=detail)


def beat(epoch: str = E1, num_steps: int = 0, *, has_work: bool = False, **fields: object) -> Heartbeat:
    return msgspec.structs.replace(Heartbeat(epoch=epoch, num_steps=num_steps, has_work=has_work), **fields)


# ---------------------------------------------------------------- registration


def test_the_first_worker_is_welcomed_watched_and_asked_for_its_tokenizer() -> None:
    registry = new_registry()
    message = register("w0", E1, pid=77, pid_namespace="here")
    assert registry.on_register(ALICE, message, 1.0) == [
        Accept(peer=ALICE, epoch=E1),
        Watch(incarnation=1, pid=77, pid_namespace="here"),
        AskTokenizer(peer=ALICE, epoch=E1, digest=DIGEST),
    ]
    assert [record.state for record in registry] == [WorkerState.REGISTERED]


def test_it_is_ready_with_its_tokenizer() -> None:
    registry = new_registry()
    registry.on_register(ALICE, register("w0", E1), 0.0)
    assert registry.on_bundle(ALICE, bundle(E1)) == [Announce(incarnation=1, card=card())]
    assert registry.bundle(DIGEST) == FILES


def test_a_second_worker_of_the_model_needs_no_tokenizer() -> None:
    registry = ready_registry()
    assert registry.on_register(BOB, register("w1", E2), 0.0) == [
        Accept(peer=BOB, epoch=E2),
        Watch(incarnation=2, pid=1, pid_namespace=""),
        Announce(incarnation=2, card=card()),
    ]


def test_one_tokenizer_makes_all_that_wait_for_it_ready() -> None:
    registry = new_registry()
    registry.on_register(ALICE, register("w0", E1), 0.0)
    registry.on_register(BOB, register("w1", E2), 0.0)
    assert registry.on_bundle(BOB, bundle(E2)) == [
        Announce(incarnation=1, card=card()),
        Announce(incarnation=2, card=card()),
    ]


def test_a_repeated_registration_changes_nothing() -> None:
    registry = ready_registry()
    (before,) = registry
    before.in_flight = 3
    assert registry.on_register(ALICE, register("w0", E1), 9.0) == [Accept(peer=ALICE, epoch=E1)]
    assert [record.in_flight for record in registry] == [3]


def test_a_restarted_worker_replaces_its_former_life() -> None:
    registry = ready_registry()
    assert registry.on_register(BOB, register("w0", E2), 1.0) == [
        lose(LostReason.WORKER_LOST, "it was restarted"),
        Accept(peer=BOB, epoch=E2),
        Watch(incarnation=2, pid=1, pid_namespace=""),
        Announce(incarnation=2, card=card()),
    ]
    assert registry.sender(ALICE, E1) is None
    assert registry.on_register(ALICE, register("w0", E1), 2.0) == [
        Refuse(peer=ALICE, epoch=E1, kind="given_up", reason=GIVEN_UP)
    ]


def test_a_worker_that_reconnects_loses_its_streams_and_stays() -> None:
    registry = ready_registry()
    assert registry.on_register(BOB, register("w0", E1), 1.0) == [
        lose(LostReason.WORKER_LOST, "its connection broke and was made anew"),
        Accept(peer=BOB, epoch=E1),
        Watch(incarnation=2, pid=1, pid_namespace=""),
        Announce(incarnation=2, card=card()),
    ]
    assert registry.sender(ALICE, E1) is None
    assert registry.sender(BOB, E1) is not None


def test_a_connection_that_is_closed_costs_its_streams_and_the_same_life_may_come_back() -> None:
    registry = ready_registry()
    (record,) = registry
    assert registry.on_unreachable(record) == [lose(LostReason.WORKER_LOST, "its connection is closed")]
    assert registry.find("w0") is None
    accepted = registry.on_register(BOB, register("w0", E1), 1.0)
    assert accepted[0] == Accept(peer=BOB, epoch=E1)
    assert registry.sender(BOB, E1) is not None
    assert registry.sender(ALICE, E1) is None


def test_an_id_whose_process_is_known_to_live_is_not_taken_over() -> None:
    registry = ready_registry()
    (record,) = registry
    record.is_watched = True
    assert registry.on_register(BOB, register("w0", E2), 1.0) == [
        Refuse(peer=BOB, epoch=E2, kind="duplicate_id", reason="worker id 'w0' is in use by the running process 1")
    ]
    assert registry.sender(ALICE, E1) is record


@pytest.mark.parametrize("token", ["", "wrong", "secretx", "ſecret"])
def test_a_wrong_token_is_refused(token: str) -> None:
    registry = new_registry(registration_token="secret")
    assert registry.on_register(ALICE, register("w0", E1, token=token), 0.0) == [
        Refuse(peer=ALICE, epoch=E1, kind="token", reason="the registration token is wrong")
    ]
    assert list(registry) == []
    assert registry.on_register(ALICE, register("w0", E1, token="secret"), 0.0)[0] == Accept(peer=ALICE, epoch=E1)


@pytest.mark.parametrize(
    "message",
    [
        register("", E1),
        register("w" * 257, E1),
        register("w0", "short"),
        register("w0", "e" * 65),
        register("w0", E1, card=card(name="")),
        register("w0", E1, card=card(vocab_size=0)),
        register("w0", E1, card=card(vocab_size=2**40)),
        register("w0", E1, capacity=capacity(max_num_seqs=0)),
        register("w0", E1, capacity=capacity(block_size=-1)),
        register("w0", E1, capacity=capacity(max_waiting=-1)),
        register("w0", E1, capacity=capacity(max_batch_tokens=-1)),
        register("w0", E1, card=card(tensor_parallel_size=0)),
    ],
)
def test_what_no_correct_worker_registers_with_is_refused(message: object) -> None:
    registry = new_registry()
    (decision,) = registry.on_register(ALICE, message, 0.0)  # type: ignore[arg-type]
    assert isinstance(decision, Refuse)
    assert decision.kind == "invalid"
    assert list(registry) == []


def test_one_name_is_one_model() -> None:
    registry = ready_registry()
    other = card(fingerprint="f2", dtype="bfloat16")
    assert registry.on_register(BOB, register("w1", E2, card=other), 0.0) == [
        Refuse(peer=BOB, epoch=E2, kind="card", reason="model 'tiny' is served here with another fingerprint, dtype")
    ]
    assert isinstance(registry.on_register(BOB, register("w1", E2, card=card(name="b")), 0.0)[0], Accept)


def test_the_last_worker_of_a_model_may_return_with_another_one() -> None:
    registry = ready_registry()
    decisions = registry.on_register(BOB, register("w0", E2, card=card(fingerprint="f2")), 0.0)
    assert Accept(peer=BOB, epoch=E2) in decisions


def test_an_epoch_is_nobody_elses() -> None:
    registry = ready_registry()
    (decision,) = registry.on_register(BOB, register("w1", E1), 0.0)
    assert isinstance(decision, Refuse)
    assert registry.sender(ALICE, E1) is not None


# ---------------------------------------------------------------- tokenizers


def test_a_bundle_that_nobody_asked_this_peer_for_is_refused() -> None:
    registry = new_registry()
    registry.on_register(ALICE, register("w0", E1), 0.0)
    for peer, message in (
        (BOB, bundle(E1)),
        (ALICE, bundle(E2)),
        (ALICE, TokenizerBundle(epoch=E1, digest=DIGEST, files={"tokenizer.json": b"other"})),
        (ALICE, TokenizerBundle(epoch=E1, digest="0" * 64, files=FILES)),
    ):
        with pytest.raises(BundleError):
            registry.on_bundle(peer, message)
    assert [record.state for record in registry] == [WorkerState.REGISTERED]


# ---------------------------------------------------------------- life and death


def test_silence_beyond_the_timeout_ends_a_worker() -> None:
    registry = ready_registry(heartbeat_timeout_s=5.0)
    assert [registry.on_tick(float(now)) for now in range(6)] == [[]] * 6
    assert registry.on_tick(5.5) == [lose(LostReason.WORKER_LOST, "silent for 5.5 s")]
    assert registry.on_tick(6.0) == []


def test_silence_of_a_process_that_lives_is_a_stall() -> None:
    registry = ready_registry()
    (record,) = registry
    record.is_watched = True
    for now in range(6):
        registry.on_tick(float(now))
    assert registry.on_tick(6.0) == [lose(LostReason.WORKER_STALLED, "silent for 6.0 s")]


def tick_with_beats(registry: Registry, until_s: int, **fields: object) -> list[object]:
    decisions: list[object] = []
    for now in range(1, until_s + 1):
        registry.on_heartbeat(beat(**fields), float(now))  # type: ignore[arg-type]
        decisions += registry.on_tick(float(now))
    return decisions


def test_heartbeats_without_steps_while_there_is_work_are_a_stall() -> None:
    registry = ready_registry(stall_timeout_s=30.0)
    assert tick_with_beats(registry, 31, num_steps=7, has_work=True) == []  # the steps advanced from 0 to 7 at 1 s
    assert tick_with_beats(ready_registry(stall_timeout_s=30.0), 100) == []  # idle for ever
    registry.on_heartbeat(beat(num_steps=7, has_work=True), 32.0)
    assert registry.on_tick(32.0) == [lose(LostReason.WORKER_STALLED, "no step for 31.0 s with work waiting")]


def test_a_worker_that_says_idle_with_our_request_in_hand_stalls_too() -> None:
    registry = ready_registry(stall_timeout_s=10.0)
    (record,) = registry
    registry.opened(record, 0.0)
    assert [type(each) for each in tick_with_beats(registry, 11)] == [Lose]


def test_the_clock_for_a_stall_starts_with_the_first_request() -> None:
    registry = ready_registry(stall_timeout_s=10.0)
    (record,) = registry
    tick_with_beats(registry, 20)
    registry.opened(record, 20.0)
    registry.on_heartbeat(beat(), 29.0)
    registry.on_tick(25.0)
    assert registry.on_tick(29.0) == []


def test_when_the_gateway_itself_slept_nobody_is_blamed() -> None:
    registry = ready_registry(heartbeat_timeout_s=5.0, stall_timeout_s=30.0)
    registry.on_tick(0.0)
    assert registry.on_tick(100.0) == []
    assert registry.on_tick(101.0) == []


def test_the_end_of_the_process_ends_the_worker() -> None:
    registry = ready_registry()
    assert registry.on_exit(1) == [lose(LostReason.WORKER_LOST, "its process ended")]
    assert registry.on_exit(1) == []
    assert registry.find("w0") is None


def test_a_worker_that_leaves_ends_with_draining_and_is_not_chased() -> None:
    registry = ready_registry()
    (record,) = registry
    assert registry.on_leaving(record, "DRAINED") == [lose(LostReason.DRAINING, "DRAINED")]
    assert registry.on_heartbeat(beat(), 1.0) is None
    assert registry.on_stale_heartbeat(E1) == []


# ---------------------------------------------------------------- fencing


def test_numbers_in_order_pass_and_a_gap_ends_the_worker() -> None:
    registry = ready_registry()
    (record,) = registry
    assert [registry.on_sequence(record, seq) for seq in (1, 2, 3)] == [[], [], []]
    assert registry.on_sequence(record, 5) == [lose(LostReason.WORKER_LOST, "message 5 came where 4 was due")]


@pytest.mark.parametrize("seq", [0, 1, -1, 3])
def test_a_repeated_or_early_number_ends_the_worker(seq: int) -> None:
    registry = ready_registry()
    (record,) = registry
    registry.on_sequence(record, 1)
    assert len(registry.on_sequence(record, seq)) == 1
    assert list(registry) == []


def test_a_given_up_worker_that_is_heard_again_is_told_on_its_own_connection() -> None:
    registry = ready_registry()
    registry.on_exit(1)
    assert registry.sender(ALICE, E1) is None
    assert registry.on_heartbeat(beat(), 9.0) is None
    told = [Refuse(peer=ALICE, epoch=E1, kind="given_up", reason=GIVEN_UP)]
    assert registry.on_stale_heartbeat(E1) == told
    assert registry.on_stale_heartbeat(E2) == []


def test_a_message_counts_only_with_its_own_connection_and_epoch() -> None:
    registry = ready_registry()
    registry.on_register(BOB, register("w1", E2), 0.0)
    assert registry.sender(ALICE, E1) is registry.find("w0")
    assert registry.sender(BOB, E2) is registry.find("w1")
    assert [registry.sender(ALICE, E2), registry.sender(BOB, E1), registry.sender(CAROL, E1)] == [None] * 3


def test_memory_of_the_given_up_is_bounded() -> None:
    registry = new_registry()
    for number in range(MAX_REMEMBERED + 100):
        registry.on_register(ALICE, register("w0", f"{number:032}"), 0.0)
    assert len(list(registry)) == 1
    assert len(registry._given_up) == MAX_REMEMBERED


def test_a_worker_is_seen_with_the_figures_of_its_prefix_cache() -> None:
    registry = ready_registry()
    registry.on_heartbeat(beat(num_queried_tokens=90, num_hit_tokens=30), 1.0)
    (view,) = (record.view(1.0) for record in registry)
    assert (view.num_queried_tokens, view.num_hit_tokens) == (90, 30)
