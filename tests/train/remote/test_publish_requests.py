"""Tests of the requests of the main host to the driver, and of the driver's answers."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.storage.local_files import replace_file
from orchestrator.train.remote.publish_requests import (
    FOLDER,
    leave_request,
    open_requests,
    wait_for_answer,
)


def write_request(run_dir: Path, subject: str) -> Path:
    path = run_dir / FOLDER / f"publish-{subject}.request"
    replace_file(path, b"a manifest")
    return path


def test_a_request_that_arrives_again_is_carried_out_once(tmp_path: Path) -> None:
    path = write_request(tmp_path, "step_00000040.1")
    (request,) = open_requests(tmp_path)
    request.answer()
    write_request(tmp_path, "step_00000040.1")
    assert open_requests(tmp_path) == []
    assert not path.exists(), "it would be carried out when its answer is removed"
    answer = leave_request(tmp_path, "publish", "step_00000040.1", b"a manifest")
    assert not path.exists()
    assert answer == path.with_suffix(".answer")
    assert wait_for_answer(answer) == ""


def test_an_answer_stays_until_the_main_host_has_had_time_to_take_it(tmp_path: Path) -> None:
    waited_for, late = (
        write_request(tmp_path, subject) for subject in ("step_00000040.1", "step_00000030.1")
    )
    for request in open_requests(tmp_path):
        request.answer()
    answers = [path.with_suffix(".answer") for path in (waited_for, late)]
    assert all(answer.exists() for answer in answers)
    os.utime(answers[0], (0, 0))
    write_request(tmp_path, "step_00000050.1")
    open_requests(tmp_path)[0].answer()
    assert [answer.exists() for answer in answers] == [False, True]
