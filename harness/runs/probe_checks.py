"""Assertions that the tests of the machine checks share."""

from orchestrator.plan.checks.probe_types import CheckResult


def assert_fails(check: CheckResult, found: str, needed: str, fix: str) -> None:
    assert check.status == "fail"
    assert found in check.found
    assert needed in check.needed
    assert fix in check.fix
