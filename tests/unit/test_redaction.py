"""What counts as a secret, and that it is replaced."""

from __future__ import annotations

import pytest

from engine_core.redaction import Redactor, harmless, show_uncaught


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "token", "GOOGLE_CREDENTIALS", "PGPASSWORD",
        "SSHPASS", "GITHUB_PAT", "NPM_AUTH", "AUTH", "MYSQL_PWD",
    ],
)  # fmt: skip
def test_the_values_of_secret_variables_are_replaced(name):
    assert Redactor.of(env={name: "abc123xyz"})("see https://abc123xyz@host") == "see https://[redacted]@host"


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "HOME", "PATH", "AUTHOR", "PWD", "OLDPWD"]
)
def test_the_values_of_others_are_not(name):
    assert Redactor.of(env={name: "abc123xyz"})("abc123xyz") == "abc123xyz"


def test_short_values_are_not_looked_for():
    assert Redactor.of(env={"A_KEY": "on"})("monotone") == "monotone"


def test_secret_keys_of_a_config_are_found_at_any_depth():
    config = {
        "a": [{"api_key": "deep-secret"}, {"accessToken": "camel-secret"}],
        "rollout": {"stop_token_ids": ["not-a-secret"]},
    }
    redact = Redactor.of(config, env={})
    assert redact("deep-secret camel-secret not-a-secret") == "[redacted] [redacted] not-a-secret"


def test_passwords_in_urls_are_replaced_in_the_environment_and_in_a_config():
    config = {"mine": {"server": "https://me:from-config@host/x"}}
    redact = Redactor.of(config, env={"DATABASE_URL": "postgres://me:from-env@host:5432/x"})
    assert redact("from-config, postgres://me:from-env@host") == "[redacted], postgres://me:[redacted]@host"


@pytest.mark.parametrize("password", ["with/slash", "with@sign", "p4ss:word"])
def test_a_password_in_a_url_may_have_any_character_but_space(password):
    redact = Redactor.of(env={"DATABASE_URL": f"postgres://me:{password}@host:5432/x"})
    assert redact(f"password {password}!") == "password [redacted]!"


def test_an_address_without_a_password_is_no_secret():
    redact = Redactor.of(env={"INDEX": "https://hub.example:8443/models@main/files"})
    assert redact("8443/models@main") == "8443/models@main"


def test_headers_in_a_list_are_replaced():
    redact = Redactor.of({"headers": ["Authorization: Bearer abc123xyz", "Accept: text/html"]}, env={})
    assert redact("abc123xyz Bearer abc123xyz text/html") == "[redacted] [redacted] text/html"


def test_headers_of_a_config_are_replaced_with_and_without_their_scheme():
    config = {
        "headers": {"Authorization": "Bearer abc123xyz", "X-Api-Key": "def456uvw", "Accept": "text/html"}
    }
    redact = Redactor.of(config, env={})
    assert redact("Bearer abc123xyz | abc123xyz | def456uvw | text/html") == (
        "[redacted] | [redacted] | [redacted] | text/html"
    )


def test_the_longer_of_two_secrets_goes_first():
    assert Redactor(["abcdef", "abcdef-ghi"])("x abcdef-ghi y") == "x [redacted] y"


def test_a_secret_is_found_as_json_writes_it():
    import json

    secret = 'pass"word\\1'
    assert json.loads(Redactor([secret])(json.dumps({"a": secret}))) == {"a": "[redacted]"}


@pytest.mark.parametrize("code", [0x1B, 0x07, 0x08, 0x0D, 0x7F, 0x9B, 0x202E, 0xDC80])
def test_control_characters_are_spelled_out_and_lines_stay(code):
    assert harmless(f"a{chr(code)}[2Jb\n\tc\u00e9\u200d") == f"a\\x{code:02x}[2Jb\n\tc\u00e9\u200d"


def test_a_tree_keeps_its_shape():
    tree = {"a": ["secret-1", 2, None], "secret-1": True}
    assert Redactor(["secret-1"]).tree(tree) == {"a": ["[redacted]", 2, None], "[redacted]": True}


def test_what_is_shown_of_an_uncaught_error_has_no_secret_of_the_environment_or_of_a_config(
    monkeypatch, capsys
):
    monkeypatch.setenv("MY_TOKEN", "from-the-environment")
    Redactor.of({"api_key": "from-the-config"})
    try:
        raise RuntimeError("from-the-environment, from-the-config")
    except RuntimeError as error:
        show_uncaught(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert "RuntimeError: [redacted], [redacted]" in shown
    assert "Traceback" in shown
    assert "from-the-" not in shown.split("RuntimeError: ")[1]
