"""Which failure is told, and to whom: the monitor and its members as threads of one process."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time

import pytest
import torch.distributed as dist

from dormouse import DormouseError, RankFailedError
from dormouse.failures import first, messages, scope
from dormouse.failures.first import CAUSE_WAIT_S, Failure, FirstFailure
from dormouse.failures.member import Member
from dormouse.failures.messages import MESSAGE_BYTES_MAX, Lines
from dormouse.failures.monitor import ENDED, STRANGERS_MAX, Monitor

LOOPBACK = "127.0.0.1"
# A hang is a failure.
SECONDS_MAX = 20


class Ranks:
    """A monitor and the ranks that have joined it."""

    def __init__(self, count: int, joined: int | None = None):
        self.monitor = Monitor(LOOPBACK, count)
        self.members: list[Member] = []
        self.told = [threading.Event() for _ in range(count)]
        for _ in range(count if joined is None else joined):
            self.join()

    def join(self) -> Member:
        rank = len(self.members)
        self.members.append(Member(self.monitor.meeting, rank, self.told[rank].set))
        # The monitor's thread comes to know it a little later.
        wait_until(lambda: rank in self.monitor._peers)
        return self.members[-1]

    def failures(self, *ranks: int) -> list[Failure | None]:
        """What ranks heard, each of them something."""
        for rank in ranks:
            assert self.told[rank].wait(SECONDS_MAX)
        return [self.members[rank].failure for rank in ranks]

    def kill(self, rank: int) -> None:
        """Ends a connection without a word, as the end of a process does."""
        member = self.members[rank]
        member._may_end = True
        member._connection.shutdown(socket.SHUT_RDWR)


def ended(rank: int) -> Failure:
    return Failure(rank, ENDED)


# Reports, each a rank, whether it may follow, and its time; the time of the look; the cause.
CASES = {
    "nothing": ([], 9.0, None),
    "an error": ([(2, False, 0.0)], 0.0, 2),
    "the first of two errors": ([(2, False, 0.0), (1, False, 0.0)], 0.0, 2),
    "a consequence before its cause": ([(0, True, 0.0), (1, False, 0.9)], 0.9, 1),
    "a consequence after its cause": ([(1, False, 0.0), (0, True, 0.1)], 9.0, 1),
    "nothing else came": ([(0, True, 5.0)], 5.0 + CAUSE_WAIT_S, 0),
    "something may still come": ([(0, True, 5.0)], 4.9 + CAUSE_WAIT_S, None),
    "the first of two consequences": ([(1, True, 0.0), (0, True, 0.1)], 9.0, 1),
    "what is decided stays": ([(0, True, 0.0), "settle", (1, False, 9.0)], 9.0, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_among_failures(name):
    reports, now_s, rank = CASES[name]
    decided = FirstFailure()
    for report in reports:
        if report == "settle":
            decided.settle(now_s)
            continue
        reporter, may_follow, at_s = report
        decided.report(Failure(reporter, "E"), at_s, may_follow=may_follow)
    decided.settle(now_s)
    assert decided.cause == (None if rank is None else Failure(rank, "E"))


def test_when_to_settle():
    decided = FirstFailure()
    assert decided.wait_s(1.0) is None
    decided.report(Failure(0, "E"), 1.0, may_follow=True)
    assert decided.wait_s(1.0) == CAUSE_WAIT_S
    assert decided.wait_s(9.0) == 0.0
    decided.settle(9.0)
    assert decided.wait_s(9.0) is None


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_told_to_every_rank(failing):
    """Also if it is that of rank 0, whose process the monitor lives in."""
    ranks = Ranks(3)
    wanted = Failure(failing, "ValueError: a loss")
    assert ranks.members[failing].leave(ValueError("a loss")) == wanted
    assert ranks.failures(0, 1, 2) == [wanted] * 3


def test_a_death_is_told():
    ranks = Ranks(3)
    ranks.kill(2)
    assert ranks.failures(0, 1) == [ended(2)] * 2


def test_the_death_of_the_monitor_is_that_of_rank_0():
    ranks = Ranks(2)
    # The monitor reads greetings in a thread of its own.
    limit_s = time.monotonic() + SECONDS_MAX
    while len(ranks.monitor._peers) < 2:
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    for peer in list(ranks.monitor._peers.values()):
        peer.connection.shutdown(socket.SHUT_RDWR)
    assert ranks.failures(1) == [ended(0)]


def test_ranks_that_leave_are_no_failure():
    """In any order, and the end of the monitor's process after rank 0 left is none either."""
    ranks = Ranks(3)
    assert ranks.members[1].leave(None) is None
    assert ranks.members[0].leave(None) is None
    wait_until(lambda: ranks.members[2]._may_end)
    ranks.monitor._peers[2].connection.shutdown(socket.SHUT_RDWR)
    ranks.members[2]._thread.join(SECONDS_MAX)
    assert ranks.members[2].failure is None
    assert not any(event.is_set() for event in ranks.told)


def test_a_failure_after_rank_0_left_is_told():
    ranks = Ranks(3)
    ranks.members[0].leave(None)
    ranks.kill(1)
    assert ranks.failures(2) == [ended(1)]


def test_a_rank_that_joins_late_is_told():
    ranks = Ranks(3, joined=2)
    ranks.members[1].leave(ValueError("a loss"))
    ranks.join()
    assert ranks.failures(2) == [Failure(1, "ValueError: a loss")]


def test_an_error_of_a_collective_names_the_rank_that_died():
    """Its report comes first."""
    ranks = Ranks(3)
    found = []

    def leave() -> None:
        error = RuntimeError("connection closed")
        found.append(ranks.members[1].leave(error, may_follow=True))

    thread = threading.Thread(target=leave)
    thread.start()
    wait_until(lambda: ranks.monitor._peers[1].has_left)
    ranks.kill(2)
    thread.join(SECONDS_MAX)
    assert found == [ended(2)] and ranks.failures(0) == found


def test_errors_of_collectives_alone_name_one_rank_to_all():
    """All ranks report one, and the first is taken for the cause."""
    ranks = Ranks(2)
    found = {}

    def leave(rank: int) -> None:
        found[rank] = ranks.members[rank].leave(RuntimeError("timed out"), may_follow=True)

    threads = [threading.Thread(target=leave, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_MAX)
    assert found[0] == found[1] and found[0].error == "RuntimeError: timed out"


def test_strangers_are_no_ranks():
    ranks = Ranks(3, joined=2)
    meeting = ranks.monitor.meeting
    greetings = [
        {"rank": 2, "token": "of another job"},
        {"rank": 1, "token": meeting["token"]},
        {"rank": 3, "token": meeting["token"]},
        {"rank": "1", "token": meeting["token"]},
        ["rank"],
    ]
    for greeting in [json.dumps(each) for each in greetings] + ["no JSON", "x" * MESSAGE_BYTES_MAX]:
        with socket.create_connection((LOOPBACK, meeting["port"]), SECONDS_MAX) as stranger:
            stranger.sendall(greeting.encode() + b"\n")
            assert is_closed(stranger)
    # A rank that has just joined counts until its greeting is read.
    wait_until(lambda: ranks.monitor._strangers == 0)
    silent = [
        socket.create_connection((LOOPBACK, meeting["port"]), SECONDS_MAX)
        for _ in range(STRANGERS_MAX + 1)
    ]
    assert is_closed(silent[-1]), "the number of connections that have not named a rank is limited"
    silent[0].close()
    wait_until(lambda: ranks.monitor._strangers < STRANGERS_MAX)
    ranks.kill(1)
    assert ranks.failures(0) == [ended(1)], "they changed nothing"


def test_a_monitor_that_breaks_fails_nobody(caplog):
    ranks = Ranks(2)
    messages.send(ranks.members[1]._connection, failed="without the rest")
    for member in ranks.members:
        member._thread.join(SECONDS_MAX)
        assert member.failure is None
    assert "no longer told" in caplog.text


def test_children_keep_no_connection_open():
    """A worker of a data loader outlives a rank that is killed."""
    ranks = Ranks(2, joined=1)
    rank_1 = os.fork()
    if rank_1 == 0:
        Member(ranks.monitor.meeting, 1, lambda: None)
        if os.fork() == 0:
            time.sleep(SECONDS_MAX)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(rank_1, 0)[1] == signal.SIGKILL
    assert ranks.failures(0) == [ended(1)]


def test_messages_in_pieces():
    lines = Lines()
    assert lines.add(b'{"a"') == []
    assert lines.add(b': 1}\n{"b": 2}\n{') == [{"a": 1}, {"b": 2}]
    with pytest.raises(ValueError, match="accepted"):
        lines.add(b" " * MESSAGE_BYTES_MAX)


def test_any_error_has_room_in_a_message():
    text = messages.described(ValueError("\U0001f4a4" * MESSAGE_BYTES_MAX))
    assert len(json.dumps({"failed": text})) < MESSAGE_BYTES_MAX


def test_errors_that_may_follow_from_another():
    follows = scope._may_follow
    assert follows(RuntimeError()) and follows(NotImplementedError())
    assert not follows(ValueError()) and not follows(KeyboardInterrupt())
    assert not follows(DormouseError("")) and not follows(RankFailedError(ended(1)))


def test_alone_it_does_nothing():
    with pytest.raises(ZeroDivisionError), scope.fail_together():
        raise ZeroDivisionError
    with scope.fail_together():
        scope.check()
    assert scope._member is None


def test_the_error_says_who_and_what():
    error = RankFailedError(first.Failure(3, "ValueError: a loss"))
    assert str(error) == "rank 3 failed: ValueError: a loss"
    assert error.failure.rank == 3 and isinstance(error, DormouseError)


@pytest.fixture
def stores(monkeypatch):
    """The store as rank 0 has it, and as a rank of another machine does: rank 0's name is a
    loopback address on its own, and on the other 127.0.0.1 is another machine."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.2", server.port, is_master=False)
    own_names, own_connect = socket.getaddrinfo, socket.create_connection

    def names(host, *others, **named):
        return own_names("127.0.1.1" if host == "localhost" else host, *others, **named)

    def connect(address, *others, **named):
        if dist.get_rank() and address[0] == LOOPBACK:
            raise ConnectionRefusedError("of another machine")
        return own_connect(address, *others, **named)

    monkeypatch.setattr(socket, "getaddrinfo", names)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(scope, "_numbers", itertools.repeat(0))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return server, client


def test_rank_0_is_reached_by_the_address_of_the_store(stores, monkeypatch):
    members = []
    for rank, store in enumerate(stores):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda store=store: store)
        members.append(scope._join())
    error = ValueError("a loss")
    assert members[1].leave(error) == Failure(1, "ValueError: a loss")
    members[0]._thread.join(SECONDS_MAX)
    assert members[0].failure == Failure(1, "ValueError: a loss")


def test_rank_0_is_reached_where_the_store_is_on_another_machine():
    """Whose address leads there first only if rank 0 has nothing better."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meeting = {"host": "192.0.2.1"}
    assert scope._hosts(store, meeting | {"at_store": False}) == ["192.0.2.1", "localhost"]
    assert scope._hosts(store, meeting | {"at_store": True}) == ["localhost", "192.0.2.1"]
    assert scope._hosts(None, meeting | {"at_store": False}) == ["192.0.2.1"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the machine has no IPv6")
def test_the_monitor_is_reached_by_ipv6():
    ranks = Ranks(2, joined=0)
    ranks.monitor.meeting["host"] = "::1"
    assert ranks.join().leave(None) is None


def test_a_refused_connection_names_the_address_and_what_helps():
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    meeting = {"host": LOOPBACK, "port": port, "token": ""}
    with pytest.raises(ConnectionError, match=f"{LOOPBACK} port {port}: .*MASTER_PORT alone"):
        Member(meeting, 1, lambda: None)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side closed it, with or without having read everything."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def wait_until(holds) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
