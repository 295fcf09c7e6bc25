"""Tests of the completion of verbs, flags and words in a shell."""

from __future__ import annotations

import subprocess

import pytest

from orchestrator.cli.completion import completion
from orchestrator.cli.main import VERBS
from orchestrator.config.settings import flat_names
from tests.cli.helpers import Call, check_answer

COMPLETE = (
    'COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _orchestrator; echo "${{COMPREPLY[@]}}"'
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("orchestrator re", "resume report"),
        ("orchestrator train --early", "--early-stopping-patience --early-stopping-metric"),
        ("orchestrator train --precision b", "bf16"),
        ("orchestrator evaluate --spl", "--split"),
        ("orchestrator check --j", "--json"),
        ("orchestrator check --early", ""),
        ("orchestrator plan --clu", "--cluster"),
    ],
)
def test_bash_completes_verbs_flags_and_words(words: str, expected: str):
    script = completion("bash", VERBS) + COMPLETE.format(words=words)
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_every_verb_and_setting(call: Call, shell: str):
    answer = call("--completion", shell)
    assert answer.code == 0
    dashes = "-l " if shell == "fish" else "--"
    missing = [name for name in flat_names() if f"{dashes}{name.replace('_', '-')}" not in answer.out]
    assert missing == []
    assert all(verb in answer.out for verb in VERBS)


def test_an_unknown_shell_is_answered_with_the_known_ones(call: Call):
    check_answer(call("--completion", "bsh"), "no completion for 'bsh' (did you mean 'bash'?)")
    check_answer(call("--completion"), "shells are bash, zsh, fish")
