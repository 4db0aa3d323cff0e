"""The thread that reads: what it reads, faults on its way, forks, and its end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

import models
from diffusers_layerwise import LayerwiseOffloadError, OffloadHandle, files, pieces, reader, staging
from models import numbers, run
from test_checkpoint_files import chain, device, linux_only, stored, x

__all__ = ["device"]
pytestmark = linux_only


@pytest.fixture(autouse=True)
def clean() -> None:
    """No thread of an earlier test runs any more: what it still reads holds its module until it is there."""
    for _ in range(200):
        gc.collect()
        if not couriers():
            break
        time.sleep(0.01)


NAME = "layerwise-courier"


def couriers() -> list[threading.Thread]:
    """The reading threads of this process."""
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def porters() -> list[threading.Thread]:
    """The threads that copy what was read, on a CPU."""
    return [thread for thread in threading.enumerate() if thread.name == "layerwise-porter"]


def streamed(module: torch.nn.Module, device: str, tier: str = "file") -> OffloadHandle:
    """Streams a module from its files."""
    return models.stream(module, device=device, config={"host": tier})


def twice(module: torch.nn.Module) -> None:
    """Two passes: something in them has to be read."""
    for _ in range(2):
        run(module, x())


# ---- what is read


def part(source: files.Source, offset: int, count: int, target: int = 0) -> pieces.Part:
    """Bytes of a file."""
    return pieces.Part(torch.zeros(count, dtype=torch.uint8), target, source, offset)


@pytest.fixture
def source(tmp_path: Path) -> files.Source:
    """A file of 10 MiB."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(10 << 20))
    return files.Source(str(path))


def covered(found: Sequence[pieces.Piece], data: bytes) -> dict[int, bytes]:
    """What would be written where, with pieces read out of `data`."""
    written: dict[int, bytes] = {}
    for piece in found:
        assert piece.start % pieces.SECTOR == 0
        assert piece.length <= pieces.PIECE_BYTES
        read = data[piece.start : piece.start + piece.length]
        for offset, memory, target in piece.slices:
            assert offset + memory.numel() <= piece.length
            written[target] = read[offset : offset + memory.numel()]
    return written


def test_neighbours_in_a_file_are_one_read_wherever_they_go(source: files.Source) -> None:
    found = pieces.make_pieces(
        [part(source, 5000, 3000, 8192), part(source, 8000, 100, 0), part(source, 100, 900, 512)]
    )
    assert len(found) == 1
    data = Path(source.path).read_bytes()
    assert covered(found, data) == {8192: data[5000:8000], 0: data[8000:8100], 512: data[100:1000]}


def test_long_stretches_are_cut_and_far_ones_read_apart(source: files.Source) -> None:
    size = 9 << 20
    data = Path(source.path).read_bytes()
    found = pieces.make_pieces([part(source, 777, size)])
    assert len(found) == 3
    joined = b"".join(text for _, text in sorted(covered(found, data).items()))
    assert joined == data[777 : 777 + size]
    apart = pieces.make_pieces([part(source, 0, 10), part(source, 8 << 20, 10, 256)])
    assert [piece.length for piece in apart] == [10, 10]


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_stretch_is_read_to_the_end_of_the_file(source: files.Source, is_direct: bool) -> None:
    data = Path(source.path).read_bytes() + b"tail"
    Path(source.path).write_bytes(data)
    source = files.Source(source.path)
    if not is_direct:
        source.direct = None
    buffer = memoryview(torch.zeros(pieces.PIECE_BYTES, dtype=torch.uint8).numpy()).cast("B")
    start = (10 << 20) - 8192
    assert pieces.read_into(source, buffer, start, 8196) >= 8196
    assert bytes(buffer[:8196]) == data[start:]
    with pytest.raises(LayerwiseOffloadError, match="ends at byte"):
        pieces.read_into(source, buffer, start, 8200)


def test_pages_of_our_own_are_told_from_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    storage = torch.UntypedStorage.from_file(str(path), False, 1 << 20)
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    pages, start = files.Pagemap(), memory.data_ptr()
    assert list(pages.written(start, 1 << 20)) == []
    memory.sum()
    assert list(pages.written(start, 1 << 20)) == []
    memory[5000] = 1
    memory[-1] = 1
    assert list(pages.written(start, 1 << 20)) == [(4096, 4096), ((1 << 20) - 4096, 4096)]
    assert list(pages.written(start + 4999, 10)) == [(0, 10)]
    assert list(pages.written(start, 4096)) == []
    assert path.read_bytes() == bytes(1 << 20)


# ---- the thread begins and ends


def test_the_thread_starts_with_the_first_pass_and_ends_with_the_last_handle(device: str, tmp_path: Path) -> None:
    one, two = chain(tmp_path / "one"), chain(tmp_path / "two")
    handles = [streamed(one, device), streamed(two, device)]
    assert couriers() == []
    run(one, x())
    run(two, x())
    assert len(couriers()) == 1
    assert couriers()[0].daemon
    assert len(porters()) == (device == "cpu")
    handles[0].remove()
    assert len(couriers()) == 1
    handles[1].remove()
    assert couriers() == porters() == []
    assert reader.staging_bytes() == 0


def test_a_module_that_is_dropped_ends_the_thread(device: str, tmp_path: Path) -> None:
    module = chain(tmp_path)
    streamed(module, device)
    run(module, x())
    assert len(couriers()) == 1
    del module
    for _ in range(100):  # what is on its way is held until it is there
        gc.collect()
        if not couriers():
            break
        time.sleep(0.01)
    assert couriers() == []


def in_child(function: Any) -> int:
    """Runs a function in a forked child, which has ten seconds; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # the parent's worker threads don't exist here
            function()
            status = 0
        finally:
            os._exit(status)
    for _ in range(1000):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.parametrize("passes", [0, 2])
def test_a_forked_child_reads_with_a_thread_of_its_own(passes: int, tmp_path: Path) -> None:
    module = chain(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the child: with more of them sums are rounded differently
    expected = run(module, x())
    torch.set_num_threads(threads)
    handle = streamed(module, "cpu")
    for _ in range(passes):
        run(module, x())

    def child() -> None:
        for _ in range(3):
            assert torch.equal(run(module, x()), expected)
        handle.remove()
        assert couriers() == []

    assert in_child(child) == 0
    torch.set_num_threads(1)
    assert torch.equal(run(module, x()), expected)
    torch.set_num_threads(threads)


# ---- faults


@pytest.mark.parametrize("tier", ["file", "mapped"])
@pytest.mark.parametrize("fault", ["truncated", "touched"])
def test_a_file_that_changed_is_an_error_that_says_so(device: str, fault: str, tier: str, tmp_path: Path) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    handle = streamed(module, device, tier)
    for _ in range(2):
        assert torch.equal(run(module, x()), expected)
    handle.release()
    path = tmp_path / "model.safetensors"
    whole, times = path.read_bytes(), path.stat()
    if fault == "truncated":
        os.truncate(path, len(whole) // 2)
    else:
        with path.open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\xff\xff\xff\x7f")
    for _ in range(2):
        with pytest.raises(LayerwiseOffloadError, match=r"model\.safetensors has changed"):
            run(module, x())
    with path.open("r+b") as file:
        file.write(whole)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert torch.equal(run(module, x()), expected)


def test_a_file_that_cannot_be_read_is_refused_by_name_before_anything_is_touched(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        with pytest.raises(LayerwiseOffloadError, match=r"model\.safetensors can't be opened: Permission denied"):
            streamed(module, device)
        assert not hasattr(module, "_hf_hook")
        # Chosen by the plan, it stays in its map, which is open already.
        handle = models.stream(module, device=device)
        assert torch.equal(run(module, x()), expected)
        handle.remove()
    streamed(module, device)
    assert torch.equal(run(module, x()), expected)


class Disk:
    """Stands for `os.preadv`, and fails as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = os.preadv
        self.fault: Any = None
        self.calls = 0
        monkeypatch.setattr(pieces.os, "preadv", self)

    def __call__(self, fd: int, buffers: Any, offset: int) -> int:
        """A read."""
        self.calls += 1
        if self.fault is not None:
            return int(self.fault(fd, buffers, offset))
        return self.read(fd, buffers, offset)


def eio(*_: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


def nothing(*_: Any) -> int:
    return 0


@pytest.mark.parametrize("fault", [eio, nothing])
def test_a_disk_that_fails_is_an_error_and_the_next_call_is_right(
    device: str, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    streamed(module, device)
    disk = Disk(monkeypatch)
    for _ in range(3):
        disk.fault = fault
        with pytest.raises(LayerwiseOffloadError, match=r"could not be read.*Input/output|ends at byte"):
            twice(module)  # what is prefetched may still be whole
        disk.fault = None
        for _ in range(2):
            assert torch.equal(run(module, x()), expected)


def test_short_reads_are_gone_on_with(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    streamed(module, device)
    disk = Disk(monkeypatch)
    disk.fault = lambda fd, buffers, offset: disk.read(fd, [buffers[0][:512]], offset)
    for _ in range(3):
        assert torch.equal(run(module, x()), expected)


def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(files.os, "open", refusing)
    module = chain(tmp_path)
    expected = run(module, x())
    handle = streamed(module, device)
    for _ in range(3):
        assert torch.equal(run(module, x()), expected)
    assert handle.report().disk_bytes > 0


def test_alignment_that_is_refused_only_when_reading_is_done_without(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    streamed(module, device)
    disk = Disk(monkeypatch)
    refused = []

    def refuse_direct(fd: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return disk.read(fd, buffers, offset)

    disk.fault = refuse_direct
    for _ in range(3):
        assert torch.equal(run(module, x()), expected)
    assert len(refused) == 1


def test_a_thread_that_died_is_an_error_and_another_one_starts(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    streamed(module, device)
    assert torch.equal(run(module, x()), expected)
    monkeypatch.setattr(reader, "PATIENCE", 0.05)
    courier = reader._couriers[os.getpid()]
    with courier._condition:
        courier._is_ending = True
        courier._condition.notify()
    assert courier._thread is not None
    courier._thread.join()
    monkeypatch.setattr(reader.threading, "Thread", Stillborn)
    with pytest.raises(LayerwiseOffloadError, match="the thread that reads it has ended"):
        twice(module)
    monkeypatch.undo()
    assert torch.equal(run(module, x()), expected)


class Death:
    """Ends the thread that calls it, once it is armed: at the given call, before or after what it stands for."""

    def __init__(self, real: Any, at: int, moment: str) -> None:
        self.real, self.left, self.moment = real, at, moment
        self.came = False

    def __call__(self, *given: Any) -> Any:
        """The call."""
        self.left -= 1
        self.came |= self.left == 0
        if self.left == 0 and self.moment == "before":
            raise SystemExit
        found = self.real(*given)
        if self.left == 0:
            raise SystemExit
        return found


def until_dead(module: torch.nn.Module, expected: torch.Tensor, death: Death) -> None:
    """Right passes until the thread has died with something that is used: that is an error which says so."""

    def passes() -> None:
        for _ in range(20):
            assert torch.equal(run(module, x()), expected)
            if death.came:  # with a load that had been given up
                death.left, death.came = 1, False

    with pytest.raises(LayerwiseOffloadError, match=r"could not be read: the thread that .* has ended"):
        passes()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 3, 6, 11])
def test_a_thread_that_dies_while_it_copies_is_an_error_and_another_one_goes_on(
    at: int, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    handle = models.stream(module, device="cpu", mode="manual", config={"host": "file", "prefetch": 3})
    assert torch.equal(run(module, x()), expected)
    monkeypatch.setattr(reader, "PATIENCE", 0.05)
    monkeypatch.setattr(staging, "PATIENCE", 0.05)
    courier = reader._couriers[os.getpid()]
    for _ in range(2):
        death = Death(courier._hand_over, at, moment)
        courier._porter._work = death
        if moment == "before":
            until_dead(module, expected, death)
        else:
            # What it had done is either seen as done, or an error; it is never half there.
            with contextlib.suppress(LayerwiseOffloadError):
                for _ in range(20):
                    assert torch.equal(run(module, x()), expected)
            assert death.came
        courier._porter._work = courier._hand_over
        for _ in range(3):
            assert torch.equal(run(module, x()), expected)
    assert len(porters()) == len(couriers()) == 1
    handle.remove()
    assert couriers() == porters() == []


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_thread_that_dies_while_it_reads_is_an_error_and_another_one_goes_on(
    device: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    handle = models.stream(module, device=device, mode="manual", config={"host": "file", "prefetch": 3})
    assert torch.equal(run(module, x()), expected)
    monkeypatch.setattr(reader, "PATIENCE", 0.05)
    courier = reader._couriers[os.getpid()]
    for _ in range(2):
        with monkeypatch.context() as patch:
            death = Death(courier._pass_on, at, "before")
            patch.setattr(courier, "_pass_on", death)

            def fail(ticket: reader.Ticket, error: BaseException, real: Any = reader.Ticket.fail) -> None:
                if threading.current_thread().name == NAME:
                    raise error  # the last of its guards
                real(ticket, error)

            def pass_on(*given: Any, death: Death = death) -> None:
                death.left = min(death.left, 1)  # from there on, every call
                death(*given)

            death.real = courier._pass_on
            patch.setattr(reader.Ticket, "fail", fail)
            until_dead(module, expected, death)
        for _ in range(3):
            assert torch.equal(run(module, x()), expected)
    handle.remove()
    assert couriers() == porters() == []


def lost_with(courier: reader.Courier, is_async: bool, monkeypatch: pytest.MonkeyPatch, method: str) -> reader.Ticket:
    """A load with which the thread dies that calls `method`. It has raised, and is alive still for half a second."""
    dying, real = threading.Event(), getattr(courier, method)

    def die(ticket: reader.Ticket, *given: Any) -> None:
        if ticket.name == "lost":
            raise SystemExit
        real(ticket, *given)

    def linger(_: Any) -> None:
        dying.set()
        time.sleep(0.5)

    monkeypatch.setattr(threading, "excepthook", linger)
    transfer: Any = SimpleNamespace(is_async=is_async, record_ready=lambda lease: None)
    lost = reader.Ticket("lost", pieces.Route((), (), cast(Any, None)), cast(Any, None), transfer, 0)
    with monkeypatch.context() as patch:
        if method == "_hand_over":
            patch.setattr(courier._porter, "_work", die)
        else:
            patch.setattr(courier, method, die)
            patch.setattr(reader.Ticket, "fail", die)  # the last of its guards
        courier.send(lost)
        assert dying.wait(5)
    return lost


@pytest.mark.parametrize(("method", "does"), [("_pass_on", "reads it"), ("_hand_over", "copies what was read")])
def test_what_is_sent_to_a_thread_that_is_dying_with_another_load_is_done_by_the_next(
    device: str, method: str, does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "sim" and method == "_hand_over":
        pytest.skip("there is no porter")
    module = chain(tmp_path)
    expected = run(module, x())
    handle = models.stream(module, device=device, mode="manual", config={"host": "file", "prefetch": 3})
    assert torch.equal(run(module, x()), expected)
    monkeypatch.setattr(reader, "PATIENCE", 0.05)
    monkeypatch.setattr(staging, "PATIENCE", 0.05)
    lost = lost_with(reader._couriers[os.getpid()], device == "sim", monkeypatch, method)
    for _ in range(3):
        assert torch.equal(run(module, x()), expected)
    with pytest.raises(LayerwiseOffloadError, match=f"lost could not be read: the thread that {does} has ended"):
        lost.wait()
    handle.remove()
    assert couriers() == porters() == []


@pytest.mark.parametrize("which", [NAME, "layerwise-porter"])
def test_a_system_without_threads_is_an_error_and_the_next_call_is_right(
    device: str, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "sim" and which != NAME:
        pytest.skip("there is no porter")
    module = chain(tmp_path)
    expected = run(module, x())
    handle = streamed(module, device)
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == which:
            raise RuntimeError("can't start new thread")
        start(thread)

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refusing)
            for _ in range(2):
                with pytest.raises(LayerwiseOffloadError, match="could not be read: can't start new thread"):
                    run(module, x())
        for _ in range(2):
            assert torch.equal(run(module, x()), expected)
        handle.release()
        reader._couriers[os.getpid()].end()  # as at the start
    handle.remove()
    assert couriers() == porters() == []


@pytest.mark.parametrize("last", [NAME, "layerwise-porter"])
def test_a_reading_thread_may_be_the_one_that_finds_the_last_module_gone(
    device: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection of garbage comes in whatever thread: then that one ends itself and the other one."""
    if device == "sim" and last != NAME:
        pytest.skip("there is no porter")
    trouble: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", trouble.append)
    monkeypatch.setattr(threading, "excepthook", trouble.append)
    module = chain(tmp_path)
    expected = run(module, x())
    handle = streamed(module, device)
    run(module, x())
    handle.release()
    courier = reader._couriers[os.getpid()]
    real = courier._read if last == NAME else courier._hand_over
    users = list(courier.users)

    def leaving(*given: Any) -> None:
        real(*given)
        for user in users:
            reader._leave(user, os.getpid())

    if last == NAME:
        monkeypatch.setattr(courier, "_read", leaving)
    else:
        courier._porter._work = leaving
    with contextlib.suppress(LayerwiseOffloadError):  # its thread has to end
        twice(module)
    for _ in range(300):
        if courier._thread is None or not (courier._thread.is_alive() or courier._porter.is_alive()):
            break
        time.sleep(0.01)
    assert courier.staging_bytes == 0
    assert not courier._porter.is_alive()
    assert not courier._thread.is_alive()
    for _ in range(2):
        assert torch.equal(run(module, x()), expected)
    assert reader._couriers[os.getpid()] is not courier
    assert trouble == []
    handle.remove()
    assert couriers() == porters() == []


def test_interrupts_at_any_moment_leave_a_state_in_which_the_next_call_is_right(tmp_path: Path) -> None:
    """A timer's, hundreds of them: also in the middle of taking a lock, and while threads are waited for."""
    module = chain(tmp_path)
    expected = run(module, x())
    handle = models.stream(module, device="cpu", mode="manual", config={"host": "file", "prefetch": 3})
    run(module, x())
    took, came = float("inf"), 0
    for _ in range(5):  # the shortest: after a slow one, most interrupts would come too late
        begin = time.perf_counter()
        run(module, x())
        took = min(took, time.perf_counter() - begin)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for step in range(200):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + took * (step % 67) / 60)
                came += 1
                run(module, x())
                signal.setitimer(signal.ITIMER_REAL, 0)
                came -= 1
            assert torch.equal(run(module, x()), expected), step
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came > 50
    handle.remove()
    assert couriers() == porters() == []


class Stillborn:
    """A thread that ends at once."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None:
        """Does nothing."""

    def is_alive(self) -> bool:
        """Never."""
        return False

    def join(self) -> None:
        """At once."""


def test_an_interrupt_while_waiting_leaves_a_state_in_which_the_next_call_is_right(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = chain(tmp_path)
    expected = run(module, x())
    handle = streamed(module, device)
    wait = reader.Ticket.wait
    for count in range(1, 8):
        left = [count]

        def interrupted(ticket: reader.Ticket, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            wait(ticket)

        monkeypatch.setattr(reader.Ticket, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            twice(module)
        monkeypatch.setattr(reader.Ticket, "wait", wait)
        for _ in range(2):
            assert torch.equal(run(module, x()), expected)
    handle.remove()
    assert couriers() == []


def test_groups_that_are_skipped_while_they_are_read_leave_their_slots_clean(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk: prefetched groups are dropped in the middle of being read, and their slots lent to others."""
    module = chain(tmp_path)
    disk = Disk(monkeypatch)

    def slow(fd: int, buffers: Any, offset: int) -> int:
        time.sleep(0.002)
        return disk.read(fd, buffers, offset)

    orders = [(0, 1, 2, 3, 4, 5), (0, 5), (3, 1, 4, 0, 5, 2), (0,), (0, 0, 1, 1, 5, 5), (4, 2)]
    expected = [run(module, x(), order) for order in orders]
    models.stream(module, device=device, mode="manual", config={"host": "file", "prefetch": 3})
    disk.fault = slow
    for _ in range(3):
        for order, right in zip(orders, expected, strict=True):
            assert torch.equal(run(module, x(), order), right)


def test_the_host_waits_only_in_the_thread_that_reads(sim: ModuleType, tmp_path: Path) -> None:
    module = chain(tmp_path)
    handle = streamed(module, "sim")
    for _ in range(6):
        run(module, x())
    with torch.no_grad():
        given = x().to("sim")
        before = sim.counters()
        for _ in range(3):
            module(given)
        after = sim.counters()
    moved = after["h2d_bytes"] - before["h2d_bytes"]
    assert moved > 0
    assert after["h2d_nonblocking_but_sync"] == before["h2d_nonblocking_but_sync"]
    handle.remove()


def test_a_shared_folder_of_many_files_is_opened_once_per_file(tmp_path: Path) -> None:
    module = models.make(models.Chain, 6, 64)
    for index, block in enumerate(module.blocks):
        stored(block, tmp_path, f"model-{index}.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    handle = streamed(module, "cpu")
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 6
    expected = run(module, x())
    assert torch.equal(run(module, x()), expected)
    handle.remove()
    del handle
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("moment", ["while it reads", "between two pieces"])
def test_nothing_is_written_to_memory_that_was_given_away(
    device: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load is cancelled in the middle; what the memory is used for next stays as it is."""
    module = models.make(models.Chain, 1, 1536)  # 9 MiB: three pieces
    stored(module, tmp_path)
    disk = Disk(monkeypatch)
    reached, go_on = threading.Event(), threading.Event()
    stop_at = 1 if moment == "while it reads" else 2

    def slow(fd: int, buffers: Any, offset: int) -> int:
        if disk.calls == stop_at:
            reached.set()
            assert go_on.wait(10)
        return disk.read(fd, buffers, offset)

    handle = models.stream(module, device=device, config={"host": "file"})
    runtime = handle._runtime
    runtime.transfer.start()
    disk.fault = slow
    (group,) = runtime.schedules[0].groups
    assert group.start_onload(runtime.ring)
    ticket, lease = group._ticket, group.lease
    assert ticket is not None
    assert lease is not None
    assert reached.wait(10)
    group.offload(runtime.ring)
    # The next owner of the memory: what is written on the caller's stream goes behind the copies that were queued.
    runtime.transfer.wait(lease.ready)
    lease.buffer.fill_(7)
    go_on.set()
    assert ticket.done.wait(10)
    assert bool((lease.buffer.cpu() == 7).all())
    disk.fault = None
    handle.release()
    given = numbers(2, 1536)
    expected = run(models.make(models.Chain, 1, 1536), given)
    assert torch.equal(run(module, given), expected)


def test_a_process_that_ends_while_weights_are_read_ends_well(tmp_path: Path) -> None:
    stored(models.make(models.Chain, 8, 1024), tmp_path)
    script = f"""
        import atexit, os, threading
        # Runs last: a thread that is inside torch when the interpreter goes away ends the process with an abort.
        atexit.register(lambda: os._exit(3 if any("layerwise" in t.name for t in threading.enumerate()) else 0))
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch, models
        from safetensors.torch import load_file
        module = models.make(models.Chain, 8, 1024)
        for name, value in load_file({str(tmp_path / "model.safetensors")!r}).items():
            module.get_parameter(name).data = value
        models.stream(module, device="cpu", mode="manual", config={{"host": sys.argv[1], "prefetch": 4}})
        for _ in range(3):
            models.run(module, torch.zeros(1, 1024))
    """
    root = str(Path(reader.__file__).parent.parent)
    environment = dict(os.environ, PYTHONPATH=root, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    for tier in ("mapped", "file"):
        command = [sys.executable, "-c", textwrap.dedent(script), tier]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
