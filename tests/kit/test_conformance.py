"""The conformance classes themselves: run by name, and not to be talked out of a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sync_testing import LayerConformance, Negated
from sync_testing.suite.options import LIMIT, chosen

pytest_plugins = ["pytester"]
Run = Callable[..., pytest.RunResult]


def test_a_layer_by_its_name(run_suite: Run) -> None:
    result = run_suite("--layer", "bf16", "--tolerance", "0.01", "-k", "come_back", "-v")
    result.assert_outcomes(passed=16)
    result.stdout.fnmatch_lines(["*TestLayerConformance?bf16?::test_shapes_come_back*"])


def test_a_scheme_that_is_not_packaged_with_an_option(run_suite: Run) -> None:
    name = "sync_plugin_std.schemes.thread:ThreadScheme"
    run_suite("--scheme", name, "--option", "slots=4", "-k", "dtype").assert_outcomes(passed=40)


def test_a_module_that_lies_where_pytest_is_started(
    run_suite: Run, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        lying_here="from sync_plugin_std.schemes.thread import ThreadScheme as Mine"
    )
    run_suite("--scheme", "lying_here:Mine", "-k", "token or late_answer").assert_outcomes(
        passed=1, skipped=1
    )


def test_a_wrapping_scheme_that_is_not_packaged(run_suite: Run) -> None:
    name = "sync_plugin_scale:Chunked::shm"
    run_suite("--scheme", name, "-k", "an_option_that").assert_outcomes(passed=1)


def test_what_a_worker_raised_is_shown_with_the_send(
    run_suite: Run, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        raising="""
        from sync_core.wrapping import WrappingReceiver, WrappingScheme, WrappingSender

        class Raising(WrappingScheme):
            wrapper, keeps = "raising", frozenset({"late_join"})

            def create_sender(self, context):
                return WrappingSender(self.inner_sender(context))

            def create_receiver(self, context):
                return RaisingReceiver(self.inner_receiver(context))

        class RaisingReceiver(WrappingReceiver):
            def receive(self, timeout):
                raise RuntimeError("no such key")
        """
    )
    arguments = ("--scheme", "raising:Raising::thread", "--option", "timeout=0.5")
    result = run_suite(*arguments, "-k", "every_worker_gets_every_version and copy")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*receive() raised: worker 0: *RuntimeError: no such key"])


def test_a_plugin_by_its_distribution(run_suite: Run) -> None:
    run_suite("--layer", "sync-plugin-std:bf16", "-k", "thread").assert_outcomes(passed=1)


def test_a_worker_group_by_its_name(run_suite: Run) -> None:
    run_suite("--workers", "inline", "-k", "keyword").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a plugin: --scheme NAME"),
        (["--scheme", "threed"], "did you mean 'thread'?"),
        (["--scheme", "nowhere:Scheme"], "leads to nothing"),
        (["--scheme", "sync_plugin_scale:Increments::thread"], "does not leave this process"),
        (
            ["--scheme", "sync_plugin_std.schemes.thread:ThreadScheme::shm"],
            "a subclass of WrappingScheme",
        ),
        (["--scheme", "thread", "--option", "slots"], "--option is KEY=VALUE"),
    ],
)
def test_command_lines_that_make_no_sense(
    run_suite: Run, arguments: list[str], message: str
) -> None:
    result = run_suite(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


@pytest.mark.parametrize(("arguments", "limits"), [([], [LIMIT]), (["--timeout", "60"], [])])
def test_a_case_has_a_time_limit(run_suite: Run, arguments: list[str], limits: list[int]) -> None:
    run_suite("--scheme", "thread", "--collect-only", *arguments)
    marks = vars(chosen["TestSchemeConformance[thread]"])["pytestmark"]
    assert [mark.args[0] for mark in marks if mark.name == "timeout"] == limits


def test_what_is_left_out_is_skipped_with_a_reason(run_suite: Run) -> None:
    result = run_suite("--scheme", "none", "-k", "dtype", "-rs")
    result.assert_outcomes(skipped=40)
    result.stdout.fnmatch_lines(["*workers act with the trainer's own object*"])


def test_a_case_cannot_be_overridden_away() -> None:
    for override in (lambda self: None, None, pytest.mark.skip(lambda self: None)):
        with pytest.raises(TypeError, match=r"TestMine overrides test_it_keeps.*xfail"):
            type("TestMine", (LayerConformance,), {"test_it_keeps_no_thread": override})


def test_nor_by_a_class_that_is_mixed_in() -> None:
    mixed_in = type("MixedIn", (), {"test_it_keeps_no_thread": None})
    with pytest.raises(TypeError, match=r"TestMine overrides test_it_keeps.*xfail"):
        type("TestMine", (mixed_in, LayerConformance), {})
    type("TestMine", (LayerConformance, mixed_in), {})


def test_what_is_mixed_in_twice_keeps_the_parameters_of_its_case_once() -> None:
    @pytest.mark.xfail(reason="scalars are lost", strict=True)
    def fails(self: Any, senders: Any, shape: Any) -> None: ...

    mixed_in = type("MixedIn", (), {"test_shapes_come_back": fails})
    for _ in range(2):
        made: Any = type("TestMine", (mixed_in, LayerConformance), {"layer": Negated()})
    marks = [mark.name for mark in made.test_shapes_come_back.pytestmark]
    assert marks == ["parametrize", "xfail"]


def test_an_expected_failure_has_a_reason_and_keeps_the_parameters_of_its_case() -> None:
    case = "test_shapes_come_back"

    def fails(self: Any, senders: Any, shape: Any) -> None: ...

    for wrong in (pytest.mark.xfail(strict=True), pytest.mark.xfail(reason="known")):
        fails.pytestmark = []  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="xfail"):
            type("TestMine", (LayerConformance,), {case: wrong(fails)})
    fails.pytestmark = []  # type: ignore[attr-defined]
    right = pytest.mark.xfail(reason="scalars are lost", strict=True)(fails)
    made: Any = type("TestMine", (LayerConformance,), {"layer": Negated(), case: right})
    marks = [mark.name for mark in made.test_shapes_come_back.pytestmark]
    assert marks == ["parametrize", "xfail"]
