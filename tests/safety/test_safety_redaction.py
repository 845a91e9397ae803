"""Nothing that is printed or written holds a secret."""

from __future__ import annotations

import pickle
import string
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.cli import main
from trainfit.core.errors import HIDDEN, BadConfig, BadInput, redact, redact_values, redact_words

SECRET = st.text(string.ascii_letters + string.digits + "-_.!$*%", min_size=8, max_size=30)


@given(SECRET, st.sampled_from(["postgresql", "postgresql+psycopg", "https", "s3"]), st.text())
def test_a_url_loses_its_credentials_wherever_it_stands(secret: str, scheme: str, around: str):
    url = f"{scheme}://zeno:{secret}{HIDDEN}q@db.example:5432/study?sslmode=require"
    shown = redact(f"{around} hpo.storage={url} {around}")
    assert f"{secret}{HIDDEN}q" not in shown
    assert f"{scheme}://***@db.example:5432/study?sslmode=require" in shown


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:SECRETWORD@h/db",
        "postgresql://u:SECRET/WORD@h/db",
        "https://SECRETWORD@example.org/x",
        "https:/u:SECRETWORD@example.org/x",
        "postgresql://h/db?user=u&password=SECRETWORD&x=1",
        "host=h password=SECRETWORD dbname=x",
        "password='SECRETWORD and more'",
        '{"password": "SECRETWORD"}',
        "WANDB_API_KEY=SECRETWORD python train.py",
        "PGPASSWORD=SECRETWORD",
        "--hf-token=SECRETWORD",
        "Authorization: Bearer SECRETWORD",
        "Authorization: SECRETWORD",
        "DATABASE_URL=SECRETWORD",
        "DB_PW=SECRETWORD mypass=SECRETWORD PASSWORD1=SECRETWORD",
        "{'token': 'SECRETWORD'}",
        "hf_token: SECRETWORD, X-Api-Key: SECRETWORD",
        "OPENAI_KEY=SECRETWORD SESSION_COOKIE='SECRETWORD'",
        "hf_SECRETWORDSECRETWORD01",
        "tool --db-password SECRETWORD -v, curl -u me:SECRETWORD https://example.org",
        "https://example.org/x?sv=2&sig=SECRETWORD%3D&se=1 or /x?X-Amz-Signature=SECRETWORD",
        "the password SECRETWORD01 is wrong; passphrase: SECRETWORD",
        "AccountKey=SECRETWORD==;SharedAccessKey=SECRETWORD",
        "eyJSECRETWORDSECRETWORD.SECRETWORDSECRETWORD.SECRETWORD_SECRET-WORD",
    ],
)
def test_named_secrets_go(text: str):
    shown = redact(text)
    assert "SECRET" not in shown
    assert "WORD" not in shown.replace("PASSWORD", "")
    assert HIDDEN in shown


@pytest.mark.parametrize(
    "text",
    [
        "model.pad_token=[PAD] pool_tokens=4 data.max_tokens=512 token_type_ids=x",
        "sqlite:////tmp/a@b.db",
        "see https://example.org/a?b=c@d",
        "C:/me@work/runs",
        "tokenizer=hello, key=3, compass=north; the token: it was there",
        "hpo.storage=sqlite:///runs/hpo.db",
        "a password is needed; token classification; --token-type ids; secret santa 2026",
        "monkey=banana&key=3, sig=0.05, a signature=plain, --pad-token [PAD]-0, bert-base-v1",
        "nats_per_token: 3.2, db_url=sqlite:///runs/hpo.db, hf_trainer_of_a_team_1.py",
    ],
)
def test_what_is_no_secret_stays(text: str):
    assert redact(text) == text


def test_an_option_hides_the_word_behind_it():
    words = ["train.py", "--password", "one two", "--db-pass", "x", "--user", "me", "--token", "-v"]
    shown = ["train.py", "--password", "***", "--db-pass", "***", "--user", "me", "--token", "-v"]
    assert redact_words(words) == shown
    assert redact_words(["hpo.storage=postgresql://u:my p/a@ss@h/db"]) == [
        "hpo.storage=postgresql://***@h/db"
    ]


def test_the_values_of_secret_variables_are_found_without_a_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACME_API_KEY", "correcthorse9")
    monkeypatch.setenv("MYSQL_PWD", "batterystaple")
    monkeypatch.setenv("PIN_KEY", "7")  # would be found in every number
    monkeypatch.setenv("KEY", "/home/someone/key.pem")
    monkeypatch.setenv("DATABASE_URL", "staplecorrect")
    monkeypatch.setenv("PROXY", "http://someone:horsebattery@proxy.example:8080")
    said = redact("the server refused correcthorse9, batterystaple; see /home/someone/key.pem, 7")
    assert said == "the server refused ***, ***; see /home/someone/key.pem, 7"
    assert redact("staplecorrect of proxy.example, horsebattery") == "*** of proxy.example, ***"


def test_plain_data_keeps_its_form():
    data = {"a": [1, None, "https://u:pw123456@h/x"], "password": "pw", "token": None, "n": 2.5}
    shown = {"a": [1, None, "https://***@h/x"], "password": "***", "token": None, "n": 2.5}
    assert redact_values(data) == shown


def test_errors_hold_no_secret_and_survive_a_process_boundary():
    url = f"postgresql://u:{quote('p@ss/word')}@h/db"
    error = BadInput(f"cannot reach {url}", f"try {url}")
    assert "ss" not in error.what.replace("postgresql", "")
    assert str(pickle.loads(pickle.dumps(BadConfig([error])))) == str(BadConfig([error]))  # noqa: S301


def test_a_traceback_is_printed_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TRAINFIT_TRACEBACK", "1")
    error = RuntimeError("no answer from postgresql://u:hiddenword@h/db")
    main._show_traceback(RuntimeError, error, None)
    said = capsys.readouterr().err
    assert "no answer from postgresql://***@h/db" in said


@pytest.mark.parametrize(
    "words",
    [
        ["hpo", "nli", "hpo.storage=postgresql://u:hiddenword@127.0.0.1:9/db?connect_timeout=1"],
        ["hpo", "nli", "hpo.storage=postgresql://u:hidden word@h/db"],
        ["hpo", "nli", "hpo.storage=oracle://u:hiddenword@h/db"],
        ["hpo", "nli", "+hpo.storage=postgresql://u:hiddenword@h/db"],
        ["hpo", "status", "--storage", "postgresql://u:hiddenword@127.0.0.1:9/db"],
        ["train", "nli", "training.x=postgresql://u:hiddenword@h/db"],
        ["hiddenword://u:hiddenword@h"],
    ],
)
def test_bad_input_is_told_without_the_password(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main.run(words) == 2
    said = capsys.readouterr()
    assert "u:hidden" not in said.err + said.out
    assert len(said.err.splitlines()) == 1
