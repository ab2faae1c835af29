"""Secrets in variables, command lines and text: found by the name in front of them, or by their form."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "FORMS",
    "PRIVATE_NAME",
    "PRIVATE_VARIABLE",
    "SHORTEST_SECRET",
    "after_options",
    "remove_from_environment",
    "remove_from_text",
    "remove_from_words",
    "secret_values",
]

# Keys in JSON, options, and names in NAME=VALUE and NAME: VALUE in text, whose values are private.
PRIVATE_NAME = re.compile(
    r"serial|uuid|udid|switch_uid|hardware_?id|mac_?addr|token(?!iz)|secret|passw|passphrase|credential|cookie"
    r"|api[_-]?key|private[_-]?key|access[_-]?key|[_-]pwd|signature|authorization|(?<=[?&])(?:sig|key)(?==)",
    re.IGNORECASE,
)
PRIVATE_VARIABLE = re.compile(r"TOKEN(?!IZ)|SECRET|PASS|KEY|CREDENTIAL|COOKIE|AUTH|_PWD")
SHORTEST_SECRET = 6  # shorter values of private variables are words such as "yes"
# Credentials that their form shows, whatever stands in front of them.
FORMS = {
    "pem": r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    "ssh": r"\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-[\w-]+|sk-[\w-]+@openssh\.com) [A-Za-z0-9+/=]{16,}(?: [^\s\"]+)?",
    "bearer": r"\b(?i:bearer|basic) [A-Za-z0-9._~+/=-]{8,}",
    "token": r"\b(?:hf_|gh[oprsu]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|AIza|ya29\.|eyJ|pypi-Ag)[A-Za-z0-9_.-]{10,}"
    r"|\bnpm_[A-Za-z0-9]{20,}",
    "url": r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)",
}
_FORM = re.compile("|".join(FORMS.values()))
_REMOVED = "<removed>"
_WORDS = frozenset(("", "0", "1", "true", "false", "yes", "no", "on", "off", "none"))  # values that are no secrets


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """The values of private variables that may occur elsewhere, the longest first."""
    found = {value for name, value in environ.items() if _is_secret(name, value) and len(value) >= SHORTEST_SECRET}
    return sorted(found, key=len, reverse=True)


def remove_from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables in alphabetic order, with "<removed>" for secrets."""
    secrets = secret_values(environ)
    return {
        name: _REMOVED if _is_secret(name, value) else remove_from_text(value, secrets)
        for name, value in sorted(environ.items())
    }


def remove_from_words(words: Sequence[str], secrets: Iterable[str]) -> list[str]:
    """The words of a command line, with "<removed>" for ``secrets``, for values of private options and variables, and
    for credentials."""
    return [_REMOVED if PRIVATE_NAME.search(option) else _word(word, secrets) for option, word in after_options(words)]


def remove_from_text(text: str, secrets: Iterable[str]) -> str:
    """The text with "<removed>" for ``secrets`` and for credentials. A program's other text stays as it is."""
    for secret in secrets:
        text = text.replace(secret, _REMOVED)
    return _FORM.sub(_REMOVED, text)


def after_options(words: Sequence[Any]) -> Iterable[tuple[str, Any]]:
    """Each word of a command line, with the private option before it if the word is its value, else with ""."""
    for option, word in zip(["", *words], words):
        is_value = isinstance(option, str) and option.startswith("-") and "=" not in option
        is_value = is_value and isinstance(word, str) and not word.startswith("-")
        is_number = is_value and word.isdecimal() and len(word) < SHORTEST_SECRET  # --tokens 100
        yield (option if is_value and not is_number else ""), word


def _word(word: str, secrets: Iterable[str]) -> str:
    name, equals, value = word.partition("=")
    is_number = value.isdecimal() and len(value) < SHORTEST_SECRET  # --max_tokens=100
    if equals and not is_number and _is_secret(name, value):
        return f"{name}={_REMOVED}"
    return remove_from_text(word, secrets)


def _is_secret(name: str, value: str) -> bool:
    private = PRIVATE_VARIABLE.search(name) or PRIVATE_NAME.search(name)
    return bool(private) and value.lower() not in _WORDS and not os.path.exists(value)
