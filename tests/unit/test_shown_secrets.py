"""Credentials in URLs are masked wherever they are shown, and refused where a user gives one."""

import shlex

import pytest

from hetero.errors import ConfigError
from hetero.shown_secrets import refuse_credentials, shown_command, without_secrets

MARK = "mark-5817"

SECRETS = {
    f"s3://name:{MARK}@bucket/run": "s3://***@bucket/run",
    f"https://{MARK}@host/x": "https://***@host/x",
    f"http://name:p@{MARK}@host:2379": "http://***@host:2379",
    f"http://name:a/{MARK}@host/run": "http://***@host/run",
    f"http://name:7?{MARK}@host": "http://***@host",
    f"abfss://name:{MARK}@account.dfs.core.windows.net/run": "abfss://***@account.dfs.core.windows.net/run",
    f"http://a:{MARK}@h1:1,http://b:{MARK}@h2:2": "http://***@h1:1,http://***@h2:2",
    f"https://host/x?X-Amz-Expires=5&X-Amz-Signature={MARK}": "https://host/x?X-Amz-Expires=5&X-Amz-Signature=***",
    f"https://host/x?x-amz-credential={MARK}&a=1": "https://host/x?x-amz-credential=***&a=1",
    f"https://host/x?X-Amz-Security-Token={MARK}": "https://host/x?X-Amz-Security-Token=***",
    f"https://host/x?AWSAccessKeyId={MARK}&Signature={MARK}": "https://host/x?AWSAccessKeyId=***&Signature=***",
    f"https://host/x?GoogleAccessId=me&Signature={MARK}%3D": "https://host/x?GoogleAccessId=me&Signature=***",
    f"https://acct.blob.core.windows.net/c?sv=1&sig={MARK}": "https://acct.blob.core.windows.net/c?sv=1&sig=***",
    f"az://c/run?sig={MARK}": "az://c/run?sig=***",
    f"https://host/#access_token={MARK}": "https://host/#access_token=***",
    f"https://host/?key={MARK}&api_key={MARK}": "https://host/?key=***&api_key=***",
    f"https://host/?auth={MARK}&sas={MARK}&pass={MARK}": "https://host/?auth=***&sas=***&pass=***",
    f"https://host/?X%2DAmz%2DSignature={MARK}": "https://host/?X%2DAmz%2DSignature=***",
    f"https://host/?to=https%3A%2F%2Fh%2F%3Fa%3D1%26sig%3D{MARK}": "https://host/?to=https%3A%2F%2Fh%2F%3Fa%3D1%26sig%3D***",
    rf"https://host/?a=1\u0026X-Amz-Signature={MARK}": r"https://host/?a=1\u0026X-Amz-Signature=***",
    f"https://host/?password={MARK};x=1": "https://host/?password=***;x=1",
}

HARMLESS = (
    "s3://bucket/run",
    "s3://bucket/run@2/x",
    "gs://bucket/a:b@c",
    "http://127.0.0.1:2379",
    "http://[::1]:2379/a@b",
    "http://host:8080/path@x",
    "abfss://container@account.dfs.core.windows.net/run",
    "file:///folder/me@home",
    "https://host/x?list-type=2&prefix=run&tokens=5",
    "https://host/?monkey=1",
    "",
)


@pytest.mark.parametrize("url", SECRETS)
def test_credentials_are_masked_and_refused(url: str) -> None:
    assert without_secrets(url) == SECRETS[url]
    text = f'GET "{url}" in 3 ms, to me@example.org'
    assert without_secrets(text) == f'GET "{SECRETS[url]}" in 3 ms, to me@example.org'
    with pytest.raises(ConfigError, match=r"--etcd .*; take it out of the URL, and set THAT") as refused:
        refuse_credentials(url, name="--etcd", instead="set THAT")
    assert MARK not in str(refused.value)


@pytest.mark.parametrize("url", HARMLESS)
def test_other_urls_stay_as_they_are(url: str) -> None:
    assert without_secrets(url) == url
    refuse_credentials(url, name="--etcd", instead="")


@pytest.mark.parametrize(
    "url", ["{}host:2379", "http:/{}host:2379", " {}host", "HTTP:///{}host", "http://a {}host:1", "s3:/{}bucket/run"]
)
def test_credentials_in_what_is_no_url_are_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--etcd .*\*\*\*@.*; take it out of the URL") as refused:
        refuse_credentials(url.format(f"name:{MARK}@"), name="--etcd", instead="")
    assert MARK not in str(refused.value)


def test_bytes_of_a_path_that_are_no_utf_8_are_kept_as_escapes() -> None:
    assert shown_command(["hetero", "plan", "m\udcff é.yaml"]) == r"hetero plan 'm\udcff é.yaml'"


def test_a_command_is_kept_without_secrets_and_reads_the_same_in_a_shell() -> None:
    words = ["hetero", "launch", "a plan.json", "--env", f"TOKEN={MARK}", f"--env=KEY={MARK}=x", "--env", "HOME"]
    flags = ["--env", "A=1", f"--url=https://host/?sig={MARK}"]
    shown = shown_command([*words, "--", *flags])
    assert shlex.split(shown) == [
        *("hetero", "launch", "a plan.json", "--env", "TOKEN", "--env=KEY", "--env", "HOME", "--"),
        *("--env", "A=1", "--url=https://host/?sig=***"),
    ]
