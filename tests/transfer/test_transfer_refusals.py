"""Grants, results and cancels that do not fit are refused, and nothing is read or written for them."""

import dataclasses

import pytest

from kvferry.cache.errors import (
    ConfigError,
    IncompatiblePeer,
    TransferError,
)
from kvferry.transfer.outcomes import cancelled
from kvferry.transfer.types import Cancel, Direction, Grant, Permit, PromptId, ResultStatus, TransferResult, WorkerId
from tests.helpers import wait_until
from tests.transfer.bending import (
    Slow,
    lose,
    start_transfer,
    sweep,
)
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, Message, aux_of, pair, prompt_of, v1_manager


def test_grant_for_an_unknown_transfer_fails_and_frees_the_pages() -> None:
    with pair() as running:
        target = running.receiver.room(PROMPT_TOKENS)
        running.request(running.key(), target)
        error = running.wait_outcome(running.receiver).error
        assert isinstance(error, TransferError)
        assert "unknown here" in str(error)
        target.close()
        assert running.receiver.is_empty()


def test_result_with_other_epochs_is_refused() -> None:
    def age(message: Message) -> Message:
        if isinstance(message, TransferResult):
            return dataclasses.replace(message, fence=message.fence ^ 1)
        return message

    check_refused_result(age, "another life of them")


def test_result_from_another_life_of_the_sender_is_refused() -> None:
    def reincarnate(message: Message) -> Message:
        if isinstance(message, TransferResult):
            return dataclasses.replace(message, sender=dataclasses.replace(message.sender, incarnation=1))
        return message

    check_refused_result(reincarnate, "p#1")


def test_result_without_a_first_token_is_refused() -> None:
    def strip(message: Message) -> Message:
        return dataclasses.replace(message, aux=None) if isinstance(message, TransferResult) else message

    check_refused_result(strip, "exactly one first token")


def check_refused_result(bend: "object", story: str) -> None:
    with pair() as running:
        running.sender.bend = bend  # type: ignore[assignment]
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        error = running.wait_outcome(running.receiver).error
        assert isinstance(error, TransferError)
        assert story in str(error)
        assert running.receiver.outcomes[0].aux is None


@pytest.mark.parametrize(
    "change, story",
    [
        (lambda grant, worker: dataclasses.replace(grant, prompt=prompt_of(29)), "of 29 tokens, computed was prompt"),
        (
            lambda grant, worker: dataclasses.replace(grant, prompt=PromptId.of([7] * 30)),
            "of 30 tokens, computed was prompt",
        ),
        (
            lambda grant, worker: dataclasses.replace(grant, sender=dataclasses.replace(worker, incarnation=5)),
            "it is for incarnation 5",
        ),
        (
            lambda grant, worker: dataclasses.replace(
                grant, pages=grant.pages._replace(slots=tuple(slots + 64 for slots in grant.pages.slots))
            ),
            "of 64",
        ),
    ],
    ids=["prompt length", "other prompt", "sender incarnation", "slot out of range"],
)
def test_grant_that_does_not_fit_is_refused_before_any_write(change: "object", story: str) -> None:
    with pair() as running:
        worker = running.sender.worker
        running.receiver.bend = lambda m: change(m, worker) if isinstance(m, Grant) else m  # type: ignore[operator]
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        assert story in str(running.wait_outcome(running.receiver).error)
        assert all(content == bytes(len(content)) for content in running.receiver.page_bytes(target))
        target.close()
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "a refused grant is proof of quiet")


def test_receiver_that_wants_a_page_the_sender_has_not_is_refused() -> None:
    with pair() as running:
        source, key = running.sender.fill(PROMPT_TOKENS), running.key()
        # History below the prompt: the window reaches further back than the sender's pages do.
        target = running.receiver.sequence()
        target.resize(capacity=PROMPT_TOKENS, history=0)
        running.offer(key, source)
        running.request(key, target)
        assert "no page for blocks" in str(running.wait_outcome(running.receiver).error)


def test_foreign_and_late_notifications_change_nothing() -> None:
    with pair() as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        running.wait_outcome(running.receiver)
        running.wait_outcome(running.sender)
        replayed = next(message for message in running.receiver.sent if isinstance(message, Grant))
        running.sender.transceiver.on_grant(running.receiver.worker, replayed)
        failed = [m for m in running.sender.sent if isinstance(m, TransferResult)]
        wait_until(
            lambda: len([m for m in running.sender.sent if isinstance(m, TransferResult)]) == 2, 5.0, "an answer"
        )
        assert failed[0].aux == aux_of(PROMPT_TOKENS)
        assert running.receiver.poll() == running.receiver.outcomes
        assert len(running.receiver.outcomes) == 1


@pytest.mark.parametrize("field, value", [("model_digest", "other"), ("manager", "V1")])
def test_pairing_with_another_model_or_manager_lists_the_difference(field: str, value: str) -> None:
    with pair() as running:
        other = dataclasses.replace(running.receiver.transceiver.info, **{field: value})
        with pytest.raises(IncompatiblePeer) as caught:
            running.sender.transceiver.pair(other).result(WAIT_SECONDS)
        assert [reason.field for reason in caught.value.reasons] == [field]


def test_managers_of_different_versions_do_not_pair() -> None:
    with pair(managers=v1_manager) as static, pair() as pooled:
        with pytest.raises(IncompatiblePeer) as caught:
            static.sender.transceiver.pair(pooled.receiver.transceiver.info).result(WAIT_SECONDS)
        assert (caught.value.reasons[0].field, caught.value.reasons[0].local) == ("manager", "V1")


def test_key_that_is_open_already_is_refused_and_the_first_attempt_goes_on() -> None:
    with pair() as running:
        held: list[Message] = []
        running.receiver.bend = lambda message: held.append(message)
        key, _, _ = start_transfer(running)
        again = running.receiver.room(PROMPT_TOKENS)
        with pytest.raises(ConfigError, match="serves one attempt"):
            running.request(key, again)
        again.close()
        wait_until(lambda: held, WAIT_SECONDS, "the grant is under way")
        assert isinstance(held[0], Grant)
        running.sender.transceiver.on_grant(running.receiver.worker, held[0])
        assert running.wait_outcome(running.receiver).error is None


@pytest.mark.parametrize(
    "change, story",
    [
        (lambda r: dataclasses.replace(r, wire=dataclasses.replace(r.wire, num_slices=0, num_pages=0)), "0 pages in 0"),
        (lambda r: dataclasses.replace(r, wire=dataclasses.replace(r.wire, num_pages=3)), "accounts for 3 pages"),
        (lambda r: dataclasses.replace(r, wire=dataclasses.replace(r.wire, num_slices=0)), "in 0 slices"),
        (lambda r: dataclasses.replace(r, aux=aux_of(7)), "7 prompt tokens, granted was"),
        (
            lambda r: dataclasses.replace(r, aux=dataclasses.replace(r.aux, first_tokens=(1, 2))),
            "exactly one first token",
        ),
        (
            lambda r: dataclasses.replace(r, aux=dataclasses.replace(r.aux, draft_tokens=(1,))),
            "exactly one first token",
        ),
    ],
    ids=["nothing written", "fewer pages", "no slices", "other prompt", "two tokens", "draft tokens"],
)
def test_good_result_must_account_for_every_page_and_one_token(change: "object", story: str) -> None:
    check_refused_result(
        lambda m: change(m) if isinstance(m, TransferResult) and m.aux else m,  # type: ignore[operator]
        story,
    )


def test_cancel_from_a_stranger_does_not_stop_a_granted_transfer() -> None:
    Slow.over = False
    with pair(Slow) as running:
        key, _, _ = start_transfer(running)
        wait_until(lambda: running.receiver.sent, WAIT_SECONDS, "the grant was delivered")
        stranger = WorkerId("stranger", 1)
        told: list[tuple[WorkerId, Message]] = []
        send = running.sender.transceiver._sender._send
        running.sender.transceiver._sender._send = lambda to, message: (
            bool(told.append((to, message))) if to == stranger else send(to, message)
        )
        running.sender.transceiver.on_cancel(stranger, Cancel(key, stranger, cancelled("mischief"), fence=7))
        sweep(running)
        [(_, answer)] = told
        assert isinstance(answer, TransferResult)
        assert (answer.status, answer.fence, answer.quiet) == (ResultStatus.FAILED, 7, True)
        assert running.sender.poll() == []
        Slow.over = True
        assert running.wait_outcome(running.receiver).error is None


def test_permit_for_another_life_of_the_receiver_is_refused_and_nothing_is_read() -> None:
    def age(message: Message) -> Message:
        if isinstance(message, Permit):
            return dataclasses.replace(message, receiver=dataclasses.replace(message.receiver, incarnation=5))
        return message

    with pair(direction=Direction.PULL) as running:
        running.sender.bend = age
        start_transfer(running)
        assert "it is for incarnation 5 of this worker" in str(running.wait_outcome(running.receiver).error)
        wait_until(lambda: running.receiver.transceiver.num_receiving == 0, WAIT_SECONDS, "nothing is open")


def test_grant_that_was_refused_is_not_served_when_it_is_repeated_after_the_offer() -> None:
    with pair() as running:
        running.receiver.bend = lose(Cancel)
        key, target = running.key(), running.receiver.room(PROMPT_TOKENS)
        running.request(key, target)
        assert "unknown here" in str(running.wait_outcome(running.receiver).error)
        before = running.receiver.page_bytes(target)
        source = running.sender.fill(PROMPT_TOKENS)
        running.offer(key, source)
        assert running.wait_outcome(running.sender).error is not None
        [grant] = [message for message in running.receiver.sent if isinstance(message, Grant)]
        running.sender.transceiver.on_grant(running.receiver.worker, grant)
        sweep(running)
        assert running.receiver.page_bytes(target) == before
