"""Programs that are compiled beside others: when, once, and what follows a failure or the end."""

import threading
from concurrent.futures import CancelledError

import jax
import pytest

from twell_jax.train.compile_ahead import CompileAhead


def ahead_of(compiled):
    return CompileAhead(compiled, lambda key: f"{key}, at its call")


def test_a_program_is_compiled_once_in_a_thread_unless_it_is_in_use():
    threads = []

    def compiled(key):
        threads.append(threading.current_thread())
        return f"{key}, ahead"

    programs = ahead_of(compiled)
    assert programs.get("in use") == "in use, at its call"
    for key in ("in use", "next", "next"):
        programs.prepare(key)
    assert [programs.get(key) for key in ("in use", "next", "next")] == [
        "in use, at its call", "next, ahead", "next, ahead",
    ]  # fmt: skip
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_a_program_that_failed_beside_others_is_compiled_at_its_call(caplog):
    def compiled(key):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    programs = ahead_of(compiled)
    programs.prepare("next")
    assert [programs.get("next") for _ in range(2)] == 2 * ["next, at its call"]
    told = "not compiled beside training, but now: RESOURCE_EXHAUSTED: Out of memory"
    assert caplog.messages == [told]


def test_other_errors_are_not_hidden():
    programs = ahead_of(lambda key: {}[key])
    programs.prepare("next")
    with pytest.raises(KeyError):
        programs.get("next")


def test_what_waits_is_dropped_at_the_end():
    begun, may_end = threading.Event(), threading.Event()

    def compiled(key):
        begun.set()
        assert may_end.wait(60)
        return key

    programs = ahead_of(compiled)
    programs.prepare("first")
    programs.prepare("second")
    assert begun.wait(60) and programs.stop()  # the first one is being compiled
    may_end.set()
    assert programs.get("first") == "first"
    with pytest.raises(CancelledError):
        programs.get("second")
    assert not programs.stop()


def test_what_a_call_needs_is_compiled_before_it_unless_that_has_not_begun():
    begun, may_end, compiled = threading.Event(), threading.Event(), []
    programs = ahead_of(lambda key: key)

    def first():
        begun.set()
        assert may_end.wait(60)
        compiled.append("first")

    programs.prepare_call("first", first)
    programs.prepare_call("second", lambda: compiled.append("second"))
    assert begun.wait(60)
    programs.settle("second")  # is not waited for
    may_end.set()
    programs.settle("first")
    for name in ("first", "second"):  # which have been called
        programs.prepare_call(name, lambda: compiled.append("again"))
    programs.prepare_call("fails", lambda: {}["nothing"])
    for name in ("fails", "unknown"):
        programs.settle(name)
    programs.stop()
    assert compiled == ["first"]


def test_one_thing_is_compiled_at_a_time_in_the_order_of_the_preparations():
    compiled = []
    programs = ahead_of(lambda key: compiled.append(key))
    programs.prepare_call("call", lambda: compiled.append("call"))
    for key in ("first", "second"):
        programs.prepare(key)
    programs.get("second")
    assert compiled == ["call", "first", "second"]
    programs.stop()


def test_a_program_is_ready_once_it_is_compiled_or_was_called():
    may_end = threading.Event()
    programs = ahead_of(lambda key: may_end.wait(60))
    assert not programs.is_ready("called")
    programs.get("called")
    programs.prepare("prepared")
    assert programs.is_ready("called") and not programs.is_ready("prepared")
    assert not programs.is_idle()
    may_end.set()
    programs.get("prepared")
    assert programs.is_ready("prepared") and programs.is_idle()
