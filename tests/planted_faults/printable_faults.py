"""Faults of what keeps the names of strangers from moving a terminal's cursor or ending a line of a shell."""

from tests.planted_faults.fault import Fault

PRINTABLE_FAULTS = (
    Fault(
        name="a name in a file may have a line's end",
        kind="missing rule",
        file="hetero/printable_fields.py",
        find='_ESCAPES = re.compile(r"\\\\[bfnrtu]")',
        replace='_ESCAPES = re.compile(r"\\\\[bfrtu]")',
        hints=("tests/unit/test_printable_fields.py",),
    ),
    Fault(
        name="keys of a mapping in a file are no names",
        kind="missing rule",
        file="hetero/printable_fields.py",
        find='            yield from _unprintable(key, key_kind, _below(where, "a key"))\n',
        replace="",
        hints=("tests/unit/test_printable_fields.py",),
    ),
    Fault(
        name="a console lets escape sequences of names through",
        kind="missing rule",
        file="hetero/console.py",
        find="if segment.control or segment.text.isprintable():",
        replace="if True:",
        hints=("tests/unit/test_console.py",),
    ),
    Fault(
        name="words of a command are printed with what moves the cursor",
        kind="missing rule",
        file="hetero/standard_output.py",
        find="            stack.enter_context(printable_output())\n",
        replace="",
        hints=("tests/unit/test_strange_names.py",),
    ),
    Fault(
        name="the comment above a line that is pasted may end early",
        kind="missing rule",
        file="hetero/commands/launch.py",
        find="{printable(f'# {host.title}: {host.devices}')}",
        replace="# {host.title}: {host.devices}",
        hints=("tests/unit/test_strange_names.py",),
    ),
    Fault(
        name="the command that a plan says made it is shown as the plan has it",
        kind="missing rule",
        file="hetero/plan/provenance.py",
        find="return printable(shlex.join(words))",
        replace="return printable(self.command)",
        hints=("tests/unit/test_strange_names.py",),
    ),
    Fault(
        name="a separator that no editor shows ends a line of a hostfile",
        kind="missing rule",
        file="hetero/launch/hostfile.py",
        find='.replace("\\r\\n", "\\n").split("\\n")',
        replace=".splitlines()",
        hints=("tests/unit/launch/test_hostfile.py",),
    ),
)
