"""Tests of masking texts, trees, errors and streams."""

from __future__ import annotations

import io
import subprocess
import traceback
from pathlib import Path

import numpy as np
import pytest

from harness.faults.canaries import CANARIES, ENVIRONMENT, PASSWORD, URL, assert_none_in
from orchestrator.redaction import (
    MASK,
    MaskedStream,
    longest_first,
    mask,
    mask_error,
    mask_tree,
    masked_stream,
    secrets_in,
    secrets_of,
)

SECRETS = secrets_of(ENVIRONMENT)
JWT = f"eyJ{'a' * 20}.eyJ{'b' * 20}.{'c' * 20}"


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "PGPASSWORD",
        "my_secret",
        "AWS_ACCESS_KEY_ID",
        "KEY",
        "RAY_AUTH_TOKEN",
        "OPENAI_API_KEY_2",
        "GITHUB_TOKEN_PROD",
        "AZURE_STORAGE_CONNECTION_STRING",
        "SENTRY_DSN",
        "SLACK_WEBHOOK_URL",
        "SECRET_KEY_BASE",
        "PRIVATEKEY",
        "SSH_PRIVATE_KEY_PEM",
        "DB_CREDS",
        "AZURE_STORAGE_SAS",
        "BLOB_SAS_URL",
        "OAUTH",
        "GOOGLE_OAUTH2",
        "NPM_TOKEN_RO",
        "GOOGLE_CREDENTIALS_JSON",
        "DB_PASSWORDS",
        "STORAGE_ACCOUNTKEY",
        "AZURE_PAT_RO",
        "GITLAB_PASSCODE",
    ],
)
def test_values_of_telling_names_are_secrets(name: str) -> None:
    assert secrets_of({name: "correct-horse"}) == ("correct-horse",)


@pytest.mark.parametrize(
    "name",
    [
        "PWD",
        "HOME",
        "MONKEYS",
        "KEYBOARD",
        "TOKENIZERS_PARALLELISM",
        "RAY_AUTH_TOKEN_PATH",
        "CUDA_VISIBLE_DEVICES",
        "MAX_TOKEN_COUNT",
        "TOKENIZER",
        "TOKENIZER_NAME",
        "MAX_TOKENS",
        "TOKENS_PER_BATCH",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "GOOGLE_APPLICATION_CREDENTIALS_PATH",
        "OAUTH_TOKEN_URL",
        "SECRET_NAME",
        "SSH_AUTH_SOCK",
        "COOKIE_DOMAIN",
        "SASKATOON",
        "PATTERN",
        "SACRED_ROOT",
        "HOTKEYS",
    ],
)
def test_values_of_other_names_are_no_secrets(name: str) -> None:
    assert secrets_of({name: "correct-horse"}) == ()


def test_short_values_are_no_secrets() -> None:
    assert secrets_of({"A_KEY": "", "B_TOKEN": "true", "C_SECRET": "12345"}) == ()


def test_a_password_in_an_address_of_the_environment_is_a_secret() -> None:
    secrets = secrets_of({"DATABASE_URL": "postgres://me:p%40ssw0rd%21@db/x"})
    assert mask("login with p@ssw0rd! failed", secrets) == f"login with {MASK} failed"
    secrets = secrets_of({"REMOTE": "https://0123456789abcdef@host/x"})
    assert mask("login with 0123456789abcdef failed", secrets) == f"login with {MASK} failed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see s3://me:hunter2hunter2@host/x now", "see s3://me:***@host/x now"),
        ("postgres://me:p@ssw0rd@db/x and s3://a:b@h/c", "postgres://me:***@db/x and s3://a:***@h/c"),
        ("postgres://me:p@ss@w0rd@db,redis://:x@y@h", "postgres://me:***@db,redis://:***@h"),
        (str(Path("s3://me:geheim@host/x")), "s3:/me:***@host/x"),
        ("redis://:geheim@h:6379", "redis://:***@h:6379"),
        ("https://h/x?a=1&X-Amz-Signature=abc&b=2", "https://h/x?a=1&X-Amz-Signature=***&b=2"),
        ("https://h/?token=abc", "https://h/?token=***"),
        ("https://host:8265/a@b", "https://host:8265/a@b"),
        ("http://me@host/x", "http://me@host/x"),
        (
            "Protocol=https;AccountName=me;AccountKey=abc/d+e==;Suffix=x",
            "Protocol=https;AccountName=me;AccountKey=***;Suffix=x",
        ),
        ("{'Authorization': 'Bearer abc.def', 'x': 1}", "{'Authorization': 'Bearer ***', 'x': 1}"),
        ("authorization: Basic bWU6eA==", "authorization: Basic ***"),
        ("PROXY-AUTHORIZATION: BEARER abc.def", "PROXY-AUTHORIZATION: BEARER ***"),
        ("HTTP_aUTHORIZATION='Token abc'", "HTTP_aUTHORIZATION='Token ***'"),
        ("X-Api-Key: abc123", "X-Api-Key: ***"),
        ("{'x-api-key': 'abc', 'X-Auth-Token': 'd'}", "{'x-api-key': '***', 'X-Auth-Token': '***'}"),
        ("PRIVATE-TOKEN: glpat", "PRIVATE-TOKEN: ***"),
        ("Cookie: session=abc; theme=dark\nnext", "Cookie: ***\nnext"),
        ("set-cookie: id=1\r\n", "set-cookie: ***\r\n"),
        (f"git clone https://{'ghp_' + 'a1' * 18}@github.com/x", "git clone https://***@github.com/x"),
        (str(Path(f"https://{'0f' * 16}@o1.sentry.example/2")), "https:/***@o1.sentry.example/2"),
        ("abfss://my-long-container-name-1@account/x", "abfss://my-long-container-name-1@account/x"),
        ("AccountKey=abc/d+e==;Suffix=x", "AccountKey=***;Suffix=x"),
        ("Endpoint=sb://h/;SharedAccessKey=a+b=;x", "Endpoint=sb://h/;SharedAccessKey=***;x"),
        ("SharedAccessSignature=sv=1&sr=b", "SharedAccessSignature=***"),
        ("aws_secret_access_key = abc/def", "aws_secret_access_key = ***"),
        ('{"client_secret": "abc", "api_key": "d"}', '{"client_secret": "***", "api_key": "***"}'),
        ("PGPASSWORD=hunter2 psql", "PGPASSWORD=*** psql"),
        ("mysql --password hunter2 -h x", "mysql --password *** -h x"),
        ("login --api-key=abc --user me", "login --api-key=*** --user me"),
        ("['--hf-token', 'abc', 'x']", "['--hf-token', '***', 'x']"),
        (f"got {JWT}, refused", "got ***, refused"),
        (f"key {'AKIA' + 'A' * 16}", "key ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
    ],
)
def test_passwords_in_addresses_headers_and_assignments_are_masked(text: str, expected: str) -> None:
    assert mask(text) == expected
    assert mask(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "loss = 3 ? key: value & more",
        "tokenizer: gpt2, eos_token: </s>, max_tokens=512, pad_token_id = 0",
        "--max-tokens 512 --tokenizer x --key value",
        "131,072 tokens: 3.1 s; keyboard=us, key=3",
        "password: none, api_key=None, secret_key: null",
        "the password is missing; give a token: see the docs",
        "a cookie: one per client",
        "authorization: required",
        "https://me@host/x and git@github.com:a/b, user@example.com",
    ],
)
def test_ordinary_text_stays_readable(text: str) -> None:
    assert mask(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "a:/b:",
            "a:/b:c@",
            "a://",
            "?a.b-c_",
            "&token",
            "authorization: ",
            "x@",
            "a:/:@",
            ":",
            "http://u:p@h@",
        ),
        *(
            "http:/a",
            "x-",
            "x-api-key",
            "token: ",
            "password=",
            "--api-key ",
            "--a-",
            "-eyJ",
            "eyJ",
            "eyJaaaaaaaa.",
        ),
        *("hf_", "sk-", "cookie: a", "cookie: a=", "-----BEGIN PRIVATE KEY-----", "TOKEN_"),
    ],
    ids=repr,
)
@pytest.mark.timeout(30)
def test_masking_takes_linear_time(piece: str) -> None:
    """A search that starts again at each letter would take hours."""
    mask(piece * (1_000_000 // len(piece)), SECRETS)


def test_secrets_in_a_tree_are_returned_in_all_forms() -> None:
    tree = {"data": {"data_dir": f"/data/{CANARIES[3]}", "n": 3}, "origins": [f"file {CANARIES[0]}:3", None]}
    assert set(secrets_in(tree, SECRETS)) == set(secrets_of({"A_KEY": CANARIES[0], "B_KEY": CANARIES[3]}))
    assert secrets_in({"data_dir": "/plain"}, SECRETS) == ()


def test_secrets_of_two_environments_are_merged() -> None:
    assert longest_first(("abcdefgh",), ("abcdefghi", "abcdefgh")) == ("abcdefghi", "abcdefgh")


def test_the_longer_secret_is_masked_first() -> None:
    secrets = secrets_of({"A_KEY": "abcdef", "B_KEY": "abcdefghi"})
    assert mask("abcdefghi abcdef", secrets) == "*** ***"


def test_numbers_are_not_masked() -> None:
    secrets = secrets_of({"PIN_SECRET": "123456"})
    tree = {"loss": 0.123456, "step": 123456, "note": "123456", "123456": [("123456", None)]}
    assert mask_tree(tree, secrets) == {"loss": 0.123456, "step": 123456, "note": MASK, MASK: [[MASK, None]]}


def test_an_error_keeps_its_class_and_its_cause() -> None:
    try:
        try:
            raise KeyError(CANARIES[0])
        except KeyError as cause:
            raise ValueError(f"no login at {URL}", 7) from cause
    except ValueError as error:
        mask_error(error, SECRETS)
        caught = error
    assert caught.args == ("no login at " + URL.replace(PASSWORD, MASK), 7)
    assert caught.__cause__ is not None
    assert caught.__cause__.args == (MASK,)


def test_an_error_that_is_handled_when_another_is_raised_is_masked() -> None:
    """A traceback shows it: "during handling of the above exception, another exception occurred"."""
    try:
        try:
            raise KeyError(CANARIES[0])
        except KeyError:
            raise ValueError("no login")  # noqa: B904
    except ValueError as error:
        mask_error(error, SECRETS)
        caught = error
    assert caught.__cause__ is None
    assert caught.__context__ is not None
    assert caught.__context__.args == (MASK,)
    assert_none_in("".join(traceback.format_exception(caught)))


def test_paths_commands_and_notes_of_an_error_are_masked() -> None:
    failed = subprocess.CalledProcessError(
        1, ["git", "clone", URL], output=CANARIES[0].encode(), stderr=CANARIES[1]
    )
    missing = FileNotFoundError(2, "No such file or directory", f"/data/{CANARIES[2]}")
    missing.add_note(f"tried {CANARIES[3]}")
    group = ExceptionGroup("both", [failed, missing])
    mask_error(group, SECRETS)
    shown = "".join(traceback.format_exception(group))
    assert_none_in(shown + str(failed.cmd) + str(failed.output) + str(failed.stderr) + str(group.args))
    assert "No such file or directory: '/data/***'" in shown
    assert "returned non-zero exit status 1" in shown
    assert (missing.errno, failed.returncode) == (2, 1)


def test_other_objects_in_an_error_stay() -> None:
    array = np.ones(2)
    inner = object()
    error = ValueError(array, 7, (inner, CANARIES[0]))
    error.more = array  # pyrefly: ignore[missing-attribute]
    mask_error(error, SECRETS)
    assert error.args[0] is array
    assert error.args[1:] == (7, (inner, MASK))


def test_bytes_written_below_a_stream_are_masked() -> None:
    target = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream = MaskedStream(target, SECRETS)
    stream.buffer.write(f"{CANARIES[4]} \xff".encode())
    stream.buffer.flush()
    assert target.buffer.getvalue() == f"{MASK} \xff".encode()


def test_a_masked_stream_is_not_masked_again() -> None:
    target = io.StringIO()
    stream = masked_stream(target, SECRETS)
    assert masked_stream(stream, ()) is stream
    print(CANARIES[0], file=stream)
    assert target.getvalue() == f"{MASK}\n"


def test_a_masked_stream_behaves_like_the_stream() -> None:
    target = io.StringIO()
    stream = MaskedStream(target, SECRETS)
    print(CANARIES[0], URL, file=stream)
    stream.writelines([CANARIES[1], "\n"])
    assert_none_in(target.getvalue())
    assert not stream.isatty()
