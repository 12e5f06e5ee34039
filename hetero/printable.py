"""Shows text of strangers as it is written: no character of it moves the cursor, ends a line or hides another one.

Names come from cluster files, plans, hostfiles, etcd and other ranks, and reach terminals, logs and lines that are
pasted into a shell. What Unicode calls not printable (control and format characters such as escape, a newline, a change
of direction) is written as Python writes it in a literal: ``\\x1b``.
"""


def printable(text: str) -> str:
    """Return ``text`` as one line, with what is not printable written as escapes."""
    return text if text.isprintable() else "".join(map(_shown, text))


def printable_lines(text: str) -> str:
    """Return ``text`` with its lines and tabs as they are; all else that is not printable is written as escapes."""
    return "".join(each if each in "\n\t" else _shown(each) for each in text)


def _shown(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]
