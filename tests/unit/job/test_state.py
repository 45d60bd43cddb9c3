"""The states of a job: every possible transition, and the refusal of all others."""

import threading

import pytest

from spmd_serve.job.state import ImpossibleTransition, JobEvent, JobLife, JobState, transition


def test_normal_life() -> None:
    life = JobLife()
    seen = [life.state]
    seen += [life.apply(event) for event in list(JobEvent)[:-1]]
    assert seen == [
        JobState.JOINING,
        JobState.LOADING,
        JobState.SERVING,
        JobState.DRAINING,
        JobState.ENDED,
    ]


@pytest.mark.parametrize("state", JobState)
def test_a_failure_is_possible_in_every_state(state: JobState) -> None:
    assert transition(state, JobEvent.FAILURE_DECLARED) is JobState.FAILED


@pytest.mark.parametrize("event", JobEvent)
def test_nothing_follows_a_failure(event: JobEvent) -> None:
    assert transition(JobState.FAILED, event) is JobState.FAILED


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.FAILED])
def test_the_end_can_be_announced_in_every_state_but_failed(state: JobState) -> None:
    assert transition(state, JobEvent.END_ANNOUNCED) is JobState.ENDED


@pytest.mark.parametrize("event", [JobEvent.JOINED, JobEvent.LOADED])
@pytest.mark.parametrize("state", [JobState.DRAINING, JobState.ENDED])
def test_set_up_goes_on_while_the_job_drains_or_ends(state: JobState, event: JobEvent) -> None:
    assert transition(state, event) is state


def test_a_drain_request_after_the_end_changes_nothing() -> None:
    assert transition(JobState.ENDED, JobEvent.DRAIN_REQUESTED) is JobState.ENDED


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (JobState.JOINING, JobEvent.LOADED),
        (JobState.LOADING, JobEvent.JOINED),
        (JobState.SERVING, JobEvent.JOINED),
        (JobState.SERVING, JobEvent.LOADED),
    ],
)
def test_impossible_transitions_are_refused(state: JobState, event: JobEvent) -> None:
    with pytest.raises(ImpossibleTransition, match=f"{event.name} in state {state.name}"):
        transition(state, event)


def test_a_refused_event_leaves_no_trace() -> None:
    life = JobLife()
    with pytest.raises(ImpossibleTransition):
        life.apply(JobEvent.LOADED)
    assert life.state is JobState.JOINING
    assert not life.has_seen(JobEvent.LOADED)


def test_events_are_remembered_after_later_states() -> None:
    life = JobLife()
    for event in (JobEvent.JOINED, JobEvent.DRAIN_REQUESTED, JobEvent.LOADED, JobEvent.END_ANNOUNCED):
        life.apply(event)
    assert life.state is JobState.ENDED
    assert life.has_seen(JobEvent.LOADED)
    assert not life.has_seen(JobEvent.FAILURE_DECLARED)


def test_a_thread_can_wait_for_an_event() -> None:
    life = JobLife()
    assert not life.wait_for(JobEvent.END_ANNOUNCED, 0)
    thread = threading.Thread(target=life.apply, args=(JobEvent.END_ANNOUNCED,))
    thread.start()
    assert life.wait_for(JobEvent.END_ANNOUNCED, 10)
    thread.join()
