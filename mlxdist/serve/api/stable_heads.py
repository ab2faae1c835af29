"""Parts of system prompts that a client changes with each request: the prefix cache would find nothing after them."""

import re

__all__ = ["stable_head"]

# Only what says nothing to the model. Dates stay: they change once a day, and answers depend on them.
_RULES = {
    "claude-code": (
        re.compile(r"^x-anthropic-billing-header:[^\n]*\n?"),  # its version, and a digest of the conversation
        re.compile(r"<total_tokens>[^<\n]{0,64}</total_tokens>\n?"),  # those that are left of a limit of Anthropic's
    )
}


def stable_head(text: str) -> tuple[str, str]:
    """A text of a system prompt without such parts, and the name of the client whose rule has found one, or "".

    Args:
        text: the text.
    """
    for client, patterns in _RULES.items():
        stable = text
        for pattern in patterns:
            stable = pattern.sub("", stable)
        if stable != text:
            return stable, client
    return text, ""
